"""The orchestrator's own code on virtual time: simulated processes, engines, networks and judges in one event loop."""
