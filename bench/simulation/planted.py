from contextlib import contextmanager
@contextmanager
def planted(bug):
    yield
