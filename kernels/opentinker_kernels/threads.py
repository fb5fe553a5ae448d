"""Threads of products on the CPU: waking another for a small one takes longer than the product."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread(if_small: bool) -> Iterator[None]:
    """Compute what is inside on one thread, if it is small."""
    threads = torch.get_num_threads()
    if threads == 1 or not if_small:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
