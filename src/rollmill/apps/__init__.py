"""Applications: they use the core, which finds what they add by searching this package (`rollmill.plugins`)."""
