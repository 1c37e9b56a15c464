"""Our side of each benchmark, run as subprocesses under the same conditions as the peers."""
