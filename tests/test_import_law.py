"""The rings of DESIGN section 2, kept by reading the imports, those inside functions too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hexllm"

#: What each ring may import of hexllm. A dotted name is that module alone, and nothing beside it.
ALLOWED = {
    "core": {"core"},
    "model": {"core", "model", "ops"},
    "ops": {"core", "ops"},
    "engine": {"core", "model", "ops", "engine"},
    "plan": {"core", "model", "ops", "engine", "plan"},
    "server": {"core", "server", "engine.messages", "engine.client", "engine.process"},
    "testing": {"core", "model", "ops", "testing"},
    "plugins": {"core", "model", "ops"},  # and its own folder
    "cli": {"core", "server"},
    "__main__": {"cli"},
    "__init__": {"core"},
}

HEAVY = {"jax", "jaxlib", "flax", "torch", "transformers", "fastapi", "starlette", "uvicorn"}

#: Kernels may be longer: DESIGN section 2.
MAX_LINES = 400


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(path: Path, *, typing_too: bool = True, functions_too: bool = True) -> set[str]:
    """Every module a file imports, dotted and absolute; ``from a import b`` counts as ``a.b``."""
    found: set[str] = set()
    package = dotted(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, node.module] if node.module else base)
            found.update(f"{start}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found.update(
                argument.value
                for argument in node.args
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            )
        if is_type_checking(node) and not typing_too:
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not functions_too:
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def breaches(path: Path) -> list[str]:
    parts = dotted(path).split(".")
    ring = parts[1]
    found = []
    for name in sorted(imports(path)):
        if name.partition(".")[0] != "hexllm":
            continue
        target = name.split(".")[1:]
        if not target or target[0] in ("Component", "hookimpl", "__version__"):
            continue
        if ring == "plugins" and target[:2] == parts[1:3]:
            continue
        if target[0] in ALLOWED[ring] or ".".join(target[:2]) in ALLOWED[ring]:
            continue
        found.append(f"{path.relative_to(ROOT)} imports {name}")
    return found


def test_the_law_covers_every_ring() -> None:
    assert {dotted(path).split(".")[1] for path in modules()} <= set(ALLOWED)
    assert PACKAGE / "core" / "plugins.py" in modules()


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_each_ring_imports_only_what_it_may(path: Path) -> None:
    assert breaches(path) == []


def test_a_breach_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    cases = {
        "core/a.py": "def f():\n    from hexllm.engine import client",
        "engine/a.py": "import hexllm.plugins.models",
        "ops/a.py": "from hexllm import plugins",
        "server/a.py": "from hexllm.engine.runner import Runner",
        "plugins/models/a.py": "from hexllm.plugins.quant import x",
        "plugins/models/b.py": "from ..quant import x",
        "model/a.py": "import importlib\nimportlib.import_module('hexllm.server')",
    }
    for name, source in cases.items():
        path = tmp_path / "hexllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        assert len(breaches(path)) == 1, name
    fine = tmp_path / "hexllm" / "plugins" / "models" / "c.py"
    fine.write_text(
        "from hexllm.model import blocks\nfrom .a import x\nfrom hexllm import hookimpl"
    )
    assert breaches(fine) == []


def heavy(names: set[str]) -> set[str]:
    return {name for name in names if name.partition(".")[0] in HEAVY}


def test_the_core_and_the_command_never_import_a_heavy_library() -> None:
    core = [*(PACKAGE / "core").rglob("*.py"), PACKAGE / "cli.py", PACKAGE / "__init__.py"]
    assert {str(path): heavy(imports(path)) for path in core if heavy(imports(path))} == {}


def test_the_entry_modules_of_plugins_import_only_the_core() -> None:
    for path in (PACKAGE / "plugins").glob("*/__init__.py"):
        names = imports(path, typing_too=False)
        assert heavy(names) == set(), path
        ours = {name for name in names if name.startswith("hexllm.")}
        allowed = ("hexllm.core.", "hexllm.Component", "hexllm.hookimpl", "hexllm.__version__")
        assert {name for name in ours if not name.startswith(allowed)} == set(), path


def test_the_server_never_imports_jax_directly_or_indirectly() -> None:
    by_name = {dotted(path).removesuffix(".__init__"): path for path in modules()}

    def runs(name: str) -> set[str]:
        """Return the modules of hexllm that importing ``name`` runs, its packages included."""
        parts = name.split(".")
        prefixes = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
        return prefixes & by_name.keys()

    # Functions are left out beyond the server's own: the engine process starts from one of them.
    seen: dict[str, str] = {}
    queue = [(name, name) for name in by_name if name.startswith("hexllm.server")]
    while queue:
        name, chain = queue.pop()
        if name in seen:
            continue
        seen[name] = chain
        own = name.startswith("hexllm.server")
        names = imports(by_name[name], typing_too=False, functions_too=own)
        jax = {each for each in names if each.partition(".")[0] in ("jax", "jaxlib", "flax")}
        assert not jax, f"{chain} imports {sorted(jax)}"
        queue += [(each, f"{chain} > {each}") for target in names for each in runs(target)]
    assert "hexllm.engine.messages" in seen


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_no_file_is_over_400_lines(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES or "pallas" in path.stem


def component_names() -> set[str]:
    """The name and the claims of every built-in component."""
    from hexllm.core.plugins import load_plugins
    from hexllm.core.settings import PluginSettings

    registries = load_plugins(PluginSettings()).registries
    return {
        name
        for registry in registries
        for each in registry
        if each.distribution == "hexllm"
        for name in (each.component.name, *each.component.provides)
    }


def comparisons(tree: ast.AST) -> set[str]:
    """Every string that code compares with, matches or looks up in a table it writes out."""
    found: set[str] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("startswith", "endswith", "get", "claimed"):
                parts = list(node.args)
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        elif isinstance(node, ast.Dict):
            parts = [key for key in node.keys if key is not None]
        for part in parts:
            values = part.elts if isinstance(part, (ast.Tuple, ast.List, ast.Set)) else [part]
            found |= {
                value.value
                for value in values
                if isinstance(value, ast.Constant) and isinstance(value.value, str)
            }
    return found


def test_no_builtin_is_named_in_a_decision_outside_plugins() -> None:
    names = component_names()
    assert {"fcfs", "llama", "LlamaForCausalLM", "hf", "file"} <= names
    schemes = {f"{name}://" for name in names}
    names.remove("file")  # as a word of its own it is everywhere; file:// is still looked for
    named = []
    for ring in ("core", "model", "ops", "engine", "server"):
        for path in (PACKAGE / ring).rglob("*.py"):
            where = path.relative_to(PACKAGE).as_posix()
            found = comparisons(ast.parse(path.read_text(encoding="utf-8")))
            named += [
                (where, text)
                for text in sorted(found)
                if text in names or text.startswith(tuple(schemes))
            ]
    assert named == []


def test_a_decision_by_name_is_seen() -> None:
    source = "if kind == 'llama': pass\nx = {'fcfs': 1}\ny in ('hf', 'z')\nu.startswith('file://')"
    assert {"llama", "fcfs", "hf", "file://"} <= comparisons(ast.parse(source))
