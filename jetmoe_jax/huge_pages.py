"""Huge pages for host memory, which XLA's CPU backend allocates anew in every training step."""

import os
import platform
import sys


def restart() -> None:
    """Starts this process anew with huge pages in glibc's malloc, unless that is decided already.

    With Linux's usual pages a fifth to a third of a training step on a CPU goes into faults of the
    pages of its temporary memory (docs/performance.md). glibc reads the setting (2.35 and later
    know it) only when a process starts: call this first, before anything is imported or read. Does
    nothing in a process that runs more than one command: a notebook, or a script that calls it.
    """
    module = getattr(sys.modules['__main__'], '__spec__', None)
    command = module.name if module else sys.argv[0]
    alone = command in sys.orig_argv[1:] and command not in ('-c', '-')
    if alone and platform.libc_ver()[0] == 'glibc' and 'GLIBC_TUNABLES' not in os.environ:
        os.environ['GLIBC_TUNABLES'] = 'glibc.malloc.hugetlb=1'
        os.execv(sys.executable, sys.orig_argv)
