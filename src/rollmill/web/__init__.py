"""What the servers of this package share."""
