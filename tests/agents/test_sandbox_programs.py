"""The sandbox as a tool: ordinary programs work, and no layer is left out in silence."""

import os
import sys
import textwrap
from pathlib import Path

import pytest

from opentinker_core.agents.tools import landlock, seccomp
from opentinker_core.agents.tools.protocol import Deadline, ToolError
from opentinker_core.agents.tools.sandbox import PythonTool, SandboxError, SandboxSettings
from tests.agents.sandboxes import SETTINGS, assert_refused, assert_works, needs_sandbox, run
from tests.waiting import PATIENCE_S

pytestmark = needs_sandbox


# What works.


def test_ordinary_programs_work(tool: PythonTool) -> None:
    code = """
        import collections, dataclasses, datetime, decimal, fractions, hashlib, itertools, json, math, pathlib
        import pickle, random, re, shutil, sqlite3, statistics, tempfile, zipfile

        @dataclasses.dataclass
        class Point:
            x: int

        random.seed(1)
        print(math.comb(10, 3), json.dumps({"a": [1, None]}), 1 <= random.randint(1, 6) <= 6)
        print(re.findall(r"\\d+", "a1b22"), list(itertools.pairwise([1, 2, 3])), statistics.mean([1, 2, 3]))
        print(decimal.Decimal("0.1") + decimal.Decimal("0.2"), fractions.Fraction(1, 3) + 1)
        print(datetime.date(2024, 2, 29).isoformat(), collections.Counter("aab").most_common(1))
        print(pickle.loads(pickle.dumps(Point(3))), hashlib.sha256(b"x").hexdigest()[:8], "žluťoučký 🐎")
        print(sqlite3.connect("data.db").execute("select 1 + 1").fetchone())
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "a").write_text("text")
            shutil.copyfile(f"{folder}/a", "b")
        with zipfile.ZipFile("z.zip", "w") as archive:
            archive.write("b")
        print(zipfile.ZipFile("z.zip").read("b"), pathlib.Path("b").exists())
    """
    output = """\
        120 {"a": [1, null]} True
        ['1', '22'] [(1, 2), (2, 3)] 2
        0.3 4/3
        2024-02-29 [('a', 2)]
        Point(x=3) 2d711642 žluťoučký 🐎
        (2,)
        b'text' True
    """
    assert_works(tool, code, textwrap.dedent(output))


def test_calls_share_files_but_no_variables(tool: PythonTool) -> None:
    assert_works(tool, "x = 1\nopen('kept.txt', 'w').write('first')", "(no output)")
    assert_works(tool, "print(open('kept.txt').read())", "first\n")
    assert "NameError" in run(tool, "print(x)").text
    assert_works(tool, "open('helper.py', 'w').write('answer = 42')", "(no output)")
    assert_works(tool, "import helper\nprint(helper.answer)", "42\n")
    code = "import os\nos.makedirs('a/b')\nos.rename('kept.txt', 'a/b/moved')\nprint(os.listdir('a/b'))"
    assert_works(tool, code, "['moved']\n")


def test_exceptions_are_shown_with_their_lines(tool: PythonTool) -> None:
    result = run(tool, "def f(x):\n    return 1 / x\n\nprint('before')\nf(0)\n")
    assert result.error is ToolError.FAILED
    assert result.text.startswith(
        'before\nTraceback (most recent call last):\n  File "<code>", line 5, in <module>'
    )
    assert "return 1 / x" in result.text
    assert result.text.endswith("ZeroDivisionError: division by zero\n")
    assert "confined" not in result.text


def test_a_syntax_error_is_shown_with_its_place(tool: PythonTool) -> None:
    result = run(tool, "x = (\n")
    assert result.error is ToolError.FAILED
    assert result.text.startswith('  File "<code>", line 1')


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        ("import sys\nsys.exit()", None, "(no output)"),
        ("import sys\nsys.exit(3)", ToolError.FAILED, "Error: exit status 3"),
        ("import sys\nsys.exit('no luck')", ToolError.FAILED, "no luck\n"),
        ("import os\nos._exit(0)", None, "(no output)"),
        ("import sys\nsys.stdout.buffer.write(b'\\xff')", None, "\ufffd"),
        ("print(repr(input()))", ToolError.FAILED, "EOFError"),
    ],
)
def test_ends_of_programs(tool: PythonTool, code: str, error: ToolError | None, text: str) -> None:
    result = run(tool, code)
    assert result.error is error
    assert text in result.text


def test_sets_have_the_same_order_in_every_call(tool: PythonTool) -> None:
    code = "print({str(i) for i in range(50)}, hash('a'))"
    assert run(tool, code) == run(tool, code)


def test_closing_removes_the_folder_and_ends_the_tool(tool: PythonTool) -> None:
    folder = Path(run(tool, "import os\nos.makedirs('a/b')\nprint(os.getcwd())").text.strip())
    assert folder.is_dir()
    tool.close()
    tool.close()
    assert not folder.exists()
    with pytest.raises(SandboxError, match="closed"):
        run(tool, "print(1)")


def test_a_fork_of_the_owner_leaves_the_folder(tool: PythonTool) -> None:
    folder = Path(run(tool, "import os\nprint(os.getcwd())").text.strip())
    child = os.fork()
    if child == 0:
        try:
            tool.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert folder.is_dir()


def test_wrong_arguments_are_told(tool: PythonTool) -> None:
    result = tool.call({"code": 3, "speed": "fast"}, Deadline.after(PATIENCE_S))
    assert result.error is ToolError.INVALID_ARGUMENTS
    assert "code: Input should be a valid string (given: 3)" in result.text
    assert "accepted: code" in result.text


# Layers.


def test_without_a_layer_there_is_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "abi", lambda: 2)
    with pytest.raises(SandboxError, match=r"no landlock \(Landlock ABI 2.*may_lack: \[landlock\]"):
        PythonTool()
    monkeypatch.setattr(seccomp, "available", lambda: False)
    with pytest.raises(SandboxError, match=r"no landlock and no seccomp .*may_lack: \[landlock, seccomp\]"):
        PythonTool()
    with pytest.raises(SandboxError, match="no landlock "):
        PythonTool(SandboxSettings(may_lack=("seccomp",)))
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match="no sandbox on darwin; accepted: Linux"):
        PythonTool(SandboxSettings(may_lack=("seccomp", "landlock")))


def test_a_layer_that_may_lack_is_used_where_it_is_there() -> None:
    with PythonTool(SETTINGS.model_copy(update={"may_lack": frozenset({"landlock", "seccomp"})})) as tool:
        assert tool.layers == {"landlock", "seccomp"}
        assert_refused(run(tool, "open('/etc/passwd')\nprint('BREACH')"))


def test_seccomp_alone_keeps_to_one_process_without_network(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(landlock, "abi", lambda: 0)
    with PythonTool(SETTINGS.model_copy(update={"may_lack": frozenset({"landlock"})})) as tool:
        assert tool.layers == {"seccomp"}
        assert "a weaker sandbox, as the settings allow: no landlock" in caplog.text
        assert_refused(run(tool, "import socket\nsocket.socket()"))
        assert_refused(run(tool, "import os\nos.fork()"))


def test_landlock_alone_keeps_to_the_scratch_folder(monkeypatch: pytest.MonkeyPatch, secret: Path) -> None:
    monkeypatch.setattr(seccomp, "available", lambda: False)
    with PythonTool(SETTINGS.model_copy(update={"may_lack": frozenset({"seccomp"})})) as tool:
        assert tool.layers == {"landlock"}
        assert_refused(run(tool, f"open({str(secret)!r})"))
        assert_refused(run(tool, f"open({str(secret)!r}, 'w')"))
        assert_refused(run(tool, f"import os\nos.symlink({str(secret)!r}, 'link')"))
        assert_refused(run(tool, "import os, sys\nos.execv(sys.executable, ['python'])"))
        assert_refused(run(tool, f"open('/proc/{os.getpid()}/environ')"))
        if landlock.abi() >= 4:
            assert_refused(run(tool, "import socket\nsocket.create_connection(('127.0.0.1', 9))"))
        if landlock.abi() >= 6:
            assert_refused(run(tool, "import os\nos.kill(os.getppid(), 0)"))


@pytest.mark.parametrize("layer", ["landlock", "seccomp"])
def test_nothing_runs_if_a_layer_is_refused(
    tool: PythonTool, monkeypatch: pytest.MonkeyPatch, layer: str
) -> None:
    if layer == "landlock":
        monkeypatch.setattr(
            landlock, "request", lambda _: {"files": 1 << 63, "net": 0, "scope": 0, "rules": []}
        )
    else:
        monkeypatch.setattr(seccomp, "program", lambda _: b"\xff" * 8)
    with pytest.raises(
        SandboxError, match=r"the sandbox was not set up: .*(landlock_create_ruleset|SECCOMP)"
    ):
        run(tool, "open('ran', 'w')")
    monkeypatch.undo()
    assert_works(tool, "import os\nprint(os.listdir())", "[]\n")
