"""Huge pages for host memory, which XLA's CPU backend allocates anew in every training step."""

import os
import platform
import sys


def restart() -> None:
    """Starts this process anew with huge pages in glibc's malloc, unless that is decided already.

    With Linux's usual pages a fifth to a third of a training step on a CPU goes into faults of the
    pages of its temporary memory (docs/performance.md). glibc reads the setting (2.35 and later
    know it) only when a process starts: call this first, before anything is imported or read.
    """
    if platform.libc_ver()[0] == 'glibc' and 'GLIBC_TUNABLES' not in os.environ:
        os.environ['GLIBC_TUNABLES'] = 'glibc.malloc.hugetlb=1'
        os.execv(sys.executable, sys.orig_argv)
