"""Nothing in the package can execute what it loads, and no test needs the network."""

import ast
import socket
from collections.abc import Callable, Iterator

import pytest
from running import ROOT

MODULES = {"pickle", "cPickle", "dill", "joblib", "marshal", "shelve", "cloudpickle", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.save", "torch.jit.load"}


def calls(tree: ast.AST) -> Iterator[tuple[str, dict[str | None, str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}


def test_nothing_here_can_execute_what_it_loads(record_property: Callable[[str, object], None]) -> None:
    files = [*(ROOT / "minigpt").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]
    for path in files:
        if path.name == "peers.py":  # measures another project, which saves its models no other way
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not MODULES & {name.partition(".")[0] for name in names}, path
        for name, keywords in calls(tree):
            assert name not in CALLS and not name.endswith(".extractall"), path
            assert keywords.get("shell", "False") == "False", path
            if name in ("torch.load", "np.load"):
                safe = {"torch.load": ("weights_only", "True"), "np.load": ("allow_pickle", "False")}[name]
                assert keywords.get(safe[0]) == safe[1], path
    record_property("tried", len(files))


def test_the_network_is_out_of_reach() -> None:
    with pytest.raises(PermissionError, match=r"192\.0\.2\.1"):
        socket.create_connection(("192.0.2.1", 80), timeout=5)
    with pytest.raises(PermissionError, match=r"example\.org"):
        socket.getaddrinfo("example.org", 80)
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(("localhost", server.getsockname()[1]), timeout=5).close()
