"""Real processes, made by a fork: what is loaded need not be loaded again."""

import os


def in_children(count, work):
    """Fork children, each with its number; return their process ids. They end without pytest."""
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                work(number)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    return children


def wait(children):
    return [os.waitpid(child, 0)[1] for child in children]
