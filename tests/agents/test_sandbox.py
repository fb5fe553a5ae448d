"""Attacks on the sandbox: each runs inside for real, and gets nowhere."""

import os
import platform
import signal
import socket
import sysconfig
from pathlib import Path

import psutil
import pytest

import opentinker_core
from opentinker_core.agents.tools.protocol import ToolError
from opentinker_core.agents.tools.sandbox import PythonTool, SandboxSettings
from tests.agents.sandboxes import SECRET, SETTINGS, assert_refused, assert_works, needs_sandbox, run
from tests.processes import worker
from tests.waiting import wait_until

pytestmark = needs_sandbox


# Network.


@pytest.mark.parametrize(
    "attack",
    [
        "socket.create_connection(('127.0.0.1', PORT))",
        "socket.create_server(('127.0.0.1', 0))",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
        "socket.socket(socket.AF_INET6, socket.SOCK_STREAM)",
        "socket.socket(socket.AF_UNIX).connect('/run/any.sock')",
        "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "socket.socketpair()",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    ],
)
def test_no_network(tool: PythonTool, attack: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        result = run(tool, f"import socket\n{attack.replace('PORT', str(port))}\nprint('BREACH')")
        with pytest.raises(BlockingIOError):
            server.accept()
    assert_refused(result)


def test_no_names_are_resolved(tool: PythonTool) -> None:
    result = run(tool, "import socket\nprint('BREACH', socket.getaddrinfo('example.org', 80))")
    assert result.error is ToolError.FAILED
    assert "gaierror" in result.text


# Reading.


def test_no_file_beyond_the_scratch_folder_is_read(tool: PythonTool, secret: Path) -> None:
    repository = Path(opentinker_core.__file__)
    parent = f"/proc/{os.getpid()}"
    paths = ["/etc/passwd", "/etc/shadow", secret, repository, f"{parent}/environ", f"{parent}/mem"]
    paths += [f"{parent}/maps", "/proc/self/environ", "/proc/self/mem", "/dev/mem", "/dev/zero", "/dev/kmsg"]
    refused = [
        run(tool, f"open({str(path)!r}, 'rb').read(1)\nprint('BREACH')")
        for path in paths
        if Path(path).exists()
    ]
    for result in refused:
        assert_refused(result)


def test_no_folder_beyond_the_scratch_folder_is_listed(tool: PythonTool, tmp_path: Path) -> None:
    folders = [
        Path("/"),
        Path.home(),
        tmp_path,
        Path(opentinker_core.__file__).parents[1],
        Path("/proc"),
        Path("/tmp"),
    ]
    for folder in folders:
        assert_refused(run(tool, f"import os\nprint('BREACH', os.listdir({str(folder)!r}))"))


def test_no_installed_package_is_read(tool: PythonTool) -> None:
    assert "ModuleNotFoundError" in run(tool, "import pydantic").text
    package = Path(psutil.__file__)
    assert_refused(run(tool, f"print('BREACH', open({str(package)!r}).read())"))
    base = Path(sysconfig.get_path("stdlib")) / "site-packages"
    for path in list(base.rglob("*.py"))[:1]:
        assert_refused(run(tool, f"print('BREACH', open({str(path)!r}).read())"))


def test_no_session_reads_anothers_files(tool: PythonTool) -> None:
    with PythonTool(SETTINGS) as other:
        folder = run(
            other, f"import os\nopen('mine', 'w').write({SECRET!r})\nprint(os.getcwd())"
        ).text.strip()
        assert_refused(run(tool, f"print('BREACH', open({folder!r} + '/mine').read())"))
        assert_refused(run(tool, f"open({folder!r} + '/theirs', 'w')\nprint('BREACH')"))


def test_the_parents_environment_is_not_passed_on(tool: PythonTool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOUSE_KEY", SECRET)
    code = """
        import ctypes, os
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_char_p
        print(dict(os.environ), os.environb, libc.getenv(b"HOUSE_KEY"), libc.getenv(b"PATH"))
    """
    assert_works(tool, code, "{} environ({}) None None\n")


def test_no_descriptor_of_the_parent_is_left_open(tool: PythonTool, secret: Path) -> None:
    with secret.open() as file:
        os.set_inheritable(file.fileno(), True)
        code = """
            import os
            for number in range(64):
                try:
                    print(number, oct(os.fstat(number).st_mode))
                except OSError:
                    pass
        """
        assert_works(tool, code, "0 0o20666\n1 0o10600\n2 0o10600\n")


# Writing.


@pytest.mark.parametrize(
    "attack",
    [
        "open(TARGET, 'w')",
        "open(TARGET, 'a')",
        "open(TARGET, 'r+')",
        "os.open(TARGET, os.O_RDONLY | os.O_TRUNC)",
        "os.truncate(TARGET, 0)",
        "os.unlink(TARGET)",
        "os.rename(TARGET, 'stolen')",
        "open('mine', 'w'); os.rename('mine', TARGET)",
        "open('mine', 'w'); os.replace('mine', TARGET + '.new')",
        "os.link(TARGET, 'stolen')",
        "os.mkdir(TARGET + '.folder')",
        "os.rmdir(os.path.dirname(TARGET))",
        "os.open(TARGET + '.new', os.O_CREAT | os.O_WRONLY)",
        "os.open(os.path.dirname(TARGET), os.O_TMPFILE | os.O_WRONLY)",
        "os.chmod(TARGET, 0o777)",
        "os.chown(TARGET, 1, 1)",
        "os.utime(TARGET, (0, 0))",
        "os.setxattr(TARGET, 'user.note', b'x')",
        "os.mkfifo(TARGET + '.pipe')",
        "os.chdir(os.path.dirname(TARGET)); open('new', 'w')",
    ],
)
def test_nothing_beyond_the_scratch_folder_is_written(tool: PythonTool, secret: Path, attack: str) -> None:
    before = secret.stat()
    result = run(tool, f"import os\nTARGET = {str(secret)!r}\n{attack}\nprint('BREACH')")
    assert_refused(result)
    after = secret.stat()
    assert secret.read_text() == SECRET
    assert (after.st_mode, after.st_uid, after.st_mtime_ns) == (
        before.st_mode,
        before.st_uid,
        before.st_mtime_ns,
    )
    assert [path.name for path in secret.parent.iterdir()] == [secret.name]


def test_the_standard_library_is_read_only(tool: PythonTool) -> None:
    assert_refused(run(tool, "import os\nopen(os.__file__, 'a')\nprint('BREACH')"))
    assert_refused(run(tool, "import os\nos.chmod(os.__file__, 0o666)\nprint('BREACH')"))
    assert_refused(
        run(tool, "import os\nos.fchmod(os.open(os.__file__, os.O_RDONLY), 0o666)\nprint('BREACH')")
    )


@pytest.mark.parametrize("make", ["symlink", "link"])
def test_links_cannot_be_made(tool: PythonTool, secret: Path, make: str) -> None:
    assert_refused(run(tool, f"import os\nos.{make}({str(secret)!r}, 'link')\nprint('BREACH')"))


def test_a_link_that_lies_in_the_scratch_folder_does_not_lead_out(tool: PythonTool, secret: Path) -> None:
    folder = Path(run(tool, "import os\nprint(os.getcwd())").text.strip())
    (folder / "file").symlink_to(secret)
    (folder / "folder").symlink_to(secret.parent)
    for attack in ("open('file').read()", "open('file', 'w')", f"open('folder/{secret.name}').read()"):
        assert_refused(run(tool, f"print('BREACH', {attack})"))
    assert_refused(run(tool, "import os\nprint('BREACH', open(os.path.relpath('/etc/passwd')).read())"))
    tool.close()
    assert secret.read_text() == SECRET


def test_files_cannot_fill_the_disk(tool: PythonTool) -> None:
    result = run(tool, "open('large', 'wb').write(bytes(17 << 20))\nprint('BREACH')")
    assert result.error is ToolError.FAILED
    assert "File too large" in result.text
    result = run(tool, "for i in range(100): open(f'part{i}', 'wb').write(bytes(8 << 20))")
    assert result.error is ToolError.OVER_LIMIT
    assert result.text.startswith("Error: more than 67108864 bytes in files")
    assert_works(tool, "import os\nprint(os.listdir())", "[]\n")


def test_space_cannot_be_reserved_beyond_the_limit_of_a_file(tool: PythonTool) -> None:
    code = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        file = open("large", "wb")
        print(libc.fallocate(file.fileno(), 1, 0, 1 << 30), os.strerror(ctypes.get_errno()))
        print(os.stat("large").st_blocks)
    """
    assert_works(tool, code, "-1 Operation not permitted\n0\n")


def test_files_cannot_be_without_number(tool: PythonTool) -> None:
    result = run(tool, "for i in range(2000): open(str(i), 'w')")
    assert result.error is ToolError.OVER_LIMIT
    assert result.text.startswith("Error: more than 1000 files and folders")


def test_folders_deeper_than_a_path_are_removed(tool: PythonTool) -> None:
    code = """
        import os
        print(os.getcwd(), flush=True)
        for _ in range(3000):
            os.mkdir("d" * 50)
            os.chdir("d" * 50)
        os.mkdir("locked", 0)
    """
    result = run(tool, code)
    assert result.error is ToolError.OVER_LIMIT
    folder = Path(result.text.splitlines()[0])
    assert list(folder.iterdir()) == []
    tool.close()
    assert not folder.exists()


# Processes, threads, signals.


@pytest.mark.parametrize(
    "attack",
    [
        "while True: os.fork()",
        "os.forkpty()",
        "os.posix_spawn(sys.executable, ['python'], {})",
        "subprocess.run([sys.executable, '-c', ''])",
        "os.execv(sys.executable, ['python'])",
        "multiprocessing.get_context('fork').Process(target=print).start()",
        "os.system('true') and print('PermissionError') or sys.exit(1)",
    ],
)
def test_no_processes_are_made(tool: PythonTool, attack: str) -> None:
    assert_refused(run(tool, f"import multiprocessing, os, subprocess, sys\n{attack}\nprint('BREACH')"))


def test_no_threads_are_made(tool: PythonTool) -> None:
    result = run(tool, "import threading\nwhile True: threading.Thread(target=input).start()")
    assert result.error is ToolError.FAILED
    assert "can't start new thread" in result.text


@pytest.mark.parametrize(
    "attack",
    [
        "os.kill(os.getppid(), signal.SIGTERM)",
        "os.kill(os.getppid(), 0)",
        "os.kill(-1, signal.SIGKILL)",
        "os.killpg(0, signal.SIGKILL)",
        "os.setpgid(0, os.getppid())",
        "os.setsid()",
        "signal.pidfd_send_signal(os.pidfd_open(os.getppid()), signal.SIGTERM)",
        "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
        "fcntl.fcntl(os.pipe()[0], fcntl.F_SETSIG, signal.SIGKILL)",
        "os.sched_setaffinity(os.getppid(), {0})",
        "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
        "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
        "os.setuid(0)",
        "os.nice(-1)",
        "os.chroot('.')",
    ],
)
def test_no_other_process_is_touched(tool: PythonTool, monkeypatch: pytest.MonkeyPatch, attack: str) -> None:
    arrived: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: arrived.append(number))
    try:
        result = run(tool, f"import fcntl, os, resource, signal\n{attack}\nprint('BREACH')")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert_refused(result)
    assert arrived == []


def test_nothing_runs_after_the_call(tool: PythonTool) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    result = run(tool, "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(10**6)", seconds=1.0)
    assert result.error is ToolError.TIMED_OUT
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    for line in result.text.splitlines()[:-1]:
        assert not psutil.pid_exists(int(line))


def test_nothing_outlives_a_parent_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where it leaves its scratch folder
    with worker("tests.agents.sandbox_worker") as parent:
        inside = int(parent.line())
        assert psutil.pid_exists(inside)
    wait_until(lambda: not _runs(inside), "the end of the process in the sandbox")


def _runs(pid: int) -> bool:
    """Whether there is such a process, other than one that has ended and whom nobody has asked yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# Memory, time, output.


@pytest.mark.parametrize(
    "attack",
    [
        "bytearray(1 << 30)",
        "'x' * (1 << 30)",
        "kept = []\nwhile True: kept.append(bytes(1 << 20))",
        "kept = [1]\nwhile True: kept += kept",
    ],
)
def test_memory_is_limited(tool: PythonTool, attack: str) -> None:
    result = run(tool, attack)
    assert result.error is ToolError.FAILED
    assert "MemoryError" in result.text


def test_memory_outside_the_address_space_is_out_of_reach(tool: PythonTool) -> None:
    assert_refused(run(tool, "import os\nos.memfd_create('x')\nprint('BREACH')"))


@pytest.mark.parametrize(
    "attack",
    [
        "while True: pass",
        "import time\ntime.sleep(10**6)",
        "import signal\nfor n in {*range(1, 32)} - {9, 19}: signal.signal(n, print)\nwhile True: pass",
        "import os\nos.close(1); os.close(2)\nwhile True: pass",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    ],
)
def test_endless_programs_are_stopped(tool: PythonTool, attack: str) -> None:
    result = run(tool, attack, seconds=1.0)
    assert (result.error, result.text) == (ToolError.TIMED_OUT, "Error: it took too long and was stopped")


def test_the_own_limit_of_time_holds_before_a_later_deadline() -> None:
    with PythonTool(SandboxSettings(seconds=1.0)) as tool:
        assert run(tool, "while True: pass").error in (ToolError.TIMED_OUT, ToolError.OVER_LIMIT)


def test_a_deadline_that_has_passed_runs_nothing(tool: PythonTool) -> None:
    assert run(tool, "open('ran', 'w')", seconds=0).error is ToolError.TIMED_OUT
    assert_works(tool, "import os\nprint(os.listdir())", "[]\n")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_is_limited(tool: PythonTool, stream: str) -> None:
    result = run(tool, f"import sys\nwhile True: sys.{stream}.write('x' * 1000)")
    assert result.error is ToolError.OVER_LIMIT
    assert result.text == "x" * 32_768 + "\nError: it wrote more than 32768 bytes and was stopped"


def test_what_was_written_before_the_end_is_kept(tool: PythonTool) -> None:
    result = run(tool, "print('so far')\nwhile True: print(end='')", seconds=5.0)
    assert result.error is ToolError.TIMED_OUT
    assert result.text.removeprefix("so far\n") == "Error: it took too long and was stopped"


def test_recursion_ends(tool: PythonTool) -> None:
    result = run(tool, "def f(): f()\nf()")
    assert result.error is ToolError.FAILED
    assert "RecursionError" in result.text
    code = """
        import sys
        sys.setrecursionlimit(10**9)
        class Deep:
            def __repr__(self): return repr(self)
        repr(Deep())
    """
    result = run(tool, code)  # the stack of C runs out
    assert result.error in (ToolError.FAILED, ToolError.OVER_LIMIT)


# System calls by number, without Python in between.

_FORBIDDEN = {
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "clone": (56, 220),
    "clone3": (435, 435),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "mount": (165, 40),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "unshare": (272, 97),
    "setns": (308, 268),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "prctl": (157, 167),
    "seccomp": (317, 277),
    "prlimit64": (302, 261),
    "setpgid": (109, 154),
    "capset": (126, 91),
    "setuid": (105, 146),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "mq_open": (240, 180),
    "name_to_handle_at": (303, 264),
    "symlinkat": (266, 36),
    "linkat": (265, 37),
    "mknodat": (259, 33),
    "fchmodat": (268, 53),
    "fchownat": (260, 54),
    "utimensat": (280, 88),
    "inotify_init1": (294, 26),
    "landlock_create_ruleset": (444, 444),
    "a number that no call has": (9999, 9999),
    "getpid, by the table of x32": (0x40000000 + 39, 9998),
}


def test_no_forbidden_system_call_comes_through(tool: PythonTool) -> None:
    column = ("x86_64", "aarch64").index(platform.machine())
    numbers = {name: both[column] for name, both in _FORBIDDEN.items()}
    code = f"""
        import ctypes, errno
        libc = ctypes.CDLL(None, use_errno=True)
        for name, number in {numbers}.items():
            result = libc.syscall(ctypes.c_long(number), 0, 0, 0, 0, 0, 0)
            if (result, ctypes.get_errno()) != (-1, errno.EPERM):
                print("BREACH", name, result, ctypes.get_errno())
    """
    assert_works(tool, code, "(no output)")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="its machine code")
def test_a_system_call_by_the_table_of_32_bits_ends_the_process(tool: PythonTool) -> None:
    code = """
        import ctypes, mmap
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        print("BREACH", ctypes.CFUNCTYPE(ctypes.c_int)(address)())
    """
    result = run(tool, code)
    assert (result.error, result.text) == (ToolError.FAILED, "Error: the interpreter ended by SIGSYS")
