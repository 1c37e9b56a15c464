"""What a run will take, before it runs: measured in short, fitted, and put together for its sizes."""
