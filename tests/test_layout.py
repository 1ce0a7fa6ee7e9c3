"""Who may import whom (design §7), read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "decoding": {"decoding"},
    "controller": {"controller", "decoding"},
    "train": {"train", "controller", "decoding"},
    "benchmarks": {"benchmarks", "train", "controller", "decoding", "api", "commands"},
}


def _imported_parts(path: Path, package: str) -> set[str]:
    """The parts of Beamwise that a module imports; "bare" for an import by a top-level folder's own name."""
    depth = len(path.relative_to(ROOT / package).parts)
    parts: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        elif isinstance(node, ast.ImportFrom) and node.level > depth:
            parts.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            parts.add(package)
        for name in names:
            pieces = name.split(".")
            if pieces[0] == "beamwise" and len(pieces) > 1:
                parts.add(pieces[1])
            elif pieces[0] in ALLOWED:
                parts.add("bare")
    return parts


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_import_arrows(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        foreign = _imported_parts(path, package) - ALLOWED[package]
        assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}"


def test_bare_imports_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard itself: a bare import and an arrow in the wrong direction are found."""
    folder = tmp_path / "decoding"
    folder.mkdir()
    bad = folder / "bad.py"
    bad.write_text("import controller.policy\nfrom beamwise.train import data\nfrom ..controller import policy\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert _imported_parts(bad, "decoding") == {"bare", "train", "controller"}


def test_only_the_pool_touches_cache_classes() -> None:
    for path in sorted((ROOT / "decoding").glob("*.py")):
        if path.name not in ("kv_pool.py", "pool_layer.py"):
            assert "cache_utils" not in path.read_text()
            assert "DynamicCache" not in path.read_text()
