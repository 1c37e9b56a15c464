"""The peers' side of each benchmark, run as subprocesses: nothing here imports rollmill."""
