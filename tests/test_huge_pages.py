"""The restart with huge pages: in a process of its own, and in no other."""

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='glibc reads the setting')

SCRIPT = """
import os, sys
from jetmoe_jax import huge_pages
print('started', flush=True)
huge_pages.restart()
print(os.environ.get('GLIBC_TUNABLES'), sys.argv[1:])
"""


def python(*arguments, given=None, **environment):
    paths = {'PYTHONPATH': ':'.join(sys.path), 'PATH': '/usr/bin'} | environment
    return subprocess.run(
        [sys.executable, *arguments], input=given, env=paths, capture_output=True, text=True
    ).stdout.splitlines()


@pytest.fixture
def script(tmp_path):
    path = tmp_path / 'script.py'
    path.write_text(SCRIPT)
    return str(path)


def test_a_command_starts_anew_with_its_arguments(script):
    lines = python('-X', 'utf8', script, '--a=b c', '"')
    assert lines == ['started', 'started', """glibc.malloc.hugetlb=1 ['--a=b c', '"']"""]


def test_a_setting_that_is_there_stays(script):
    lines = python(script, GLIBC_TUNABLES='glibc.malloc.check=1')
    assert lines == ['started', 'glibc.malloc.check=1 []']


def test_a_process_that_runs_more_than_the_command_is_left_alone(script):
    assert python('-c', f'import runpy; runpy.run_path({script!r})') == ['started', 'None []']
    assert python('-', given=SCRIPT) == ['started', 'None []']
