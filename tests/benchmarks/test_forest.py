"""Pictures of forests: every node of every block, rightly marked, and SVG that anyone can open."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch

from beamwise.benchmarks.forest import BlockPicture, Column, ForestLog, Node
from beamwise.benchmarks.forest_svg import draw_forest, visible
from beamwise.cli import main
from beamwise.commands.bench import bench
from beamwise.decoding.generate import SpeculativeBeams
from tests.benchmarks.tiny_bench import make_options
from tests.conftest import make_tiny_llama
from tests.tiny_folder import save_tiny_folder

SVG = "{http://www.w3.org/2000/svg}"
LIVE = ("accepted", "recovered", "bonus")
VARIANTS = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "dynamic": {"width_mode": "dynamic", "threshold": 0.5},
    "rejection": {"do_sample": True, "verification": "rejection"},
}


def decode(variant: str) -> tuple[ForestLog, SpeculativeBeams]:
    settings = dict(VARIANTS[variant])
    do_sample = bool(settings.pop("do_sample", False))
    target, draft = make_tiny_llama(0, vocab_size=24, scale=0.4), make_tiny_llama(0, vocab_size=24, layers=1, scale=0.4)
    log = ForestLog(str)
    beams = SpeculativeBeams(draft, "model", gamma=3, draft_width=5, seed=2, observer=log, **settings)  # type: ignore[arg-type]
    arguments: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 24, "do_sample": do_sample, "eos_token_id": [5, 9]}
    ids = torch.tensor([[3, 4, 5]])
    target.generate(ids, **arguments, pad_token_id=0, custom_generate=beams)  # type: ignore[operator]
    return log, beams


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_node_is_there_and_beams_go_on_where_they_were(variant: str) -> None:
    log, beams = decode(variant)
    assert sum(block.advanced for block in log.blocks) == beams.stats.layers
    kinds = Counter(node.kind for block in log.blocks for node in block.nodes)
    assert kinds["accepted"] + kinds["dead"] == beams.stats.drafted_nodes
    assert kinds["accepted"]
    assert kinds["dead"]
    assert kinds["recovered"] + kinds["bonus"]
    for block in log.blocks:
        for index, node in enumerate(block.nodes):
            assert (node.parent == -1) == (node.column == 0)
            assert node.parent < index
            assert node.parent < 0 or block.nodes[node.parent].column == node.column - 1
    for block, following in zip(log.blocks, log.blocks[1:], strict=False):
        assert following.position == block.position + block.advanced
        last = [node.text for node in block.nodes if node.column == block.advanced and node.kind in LIVE]
        roots = [node.text for node in following.nodes if node.kind == "root"]
        assert sorted(last) == sorted(roots)
        for column in range(1, block.advanced + 1):
            width = block.columns[column - 1].width
            assert width is not None
            assert sum(node.column == column and node.kind in LIVE for node in block.nodes) <= width


def test_svg_of_real_blocks() -> None:
    log, _ = decode("greedy")
    root = ET.fromstring(draw_forest(log.blocks, "a title"))
    assert root.tag == f"{SVG}svg"
    assert len(root.findall(f".//{SVG}g")) == sum(len(block.nodes) for block in log.blocks)
    left, top, width, height = map(float, root.attrib["viewBox"].split())
    for box in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert left <= x <= x + w <= width
        assert top <= y <= y + h <= height
    for group in root.findall(f".//{SVG}g"):
        boxes = [tuple(box.attrib[name] for name in ("x", "y")) for box in group.iter(f"{SVG}rect")]
        assert len(boxes) == 1
    places = Counter(group[1].attrib["x"] + " " + group[1].attrib["y"] for group in root.findall(f".//{SVG}g"))
    assert set(places.values()) == {1}  # no box over another
    assert not {"script", "image", "use", "a"} & {element.tag.removeprefix(SVG) for element in root.iter()}
    assert not any("href" in name for element in root.iter() for name in element.attrib)


@pytest.mark.parametrize("text", ["<script>", "&amp;\"'", "\x00\x1b\ud800\ufffe", " \n\t", "\u202egnol", "x" * 500, ""])
def test_any_token_can_be_drawn(text: str) -> None:
    nodes = [Node(0, text, -1, "root", -1.0), Node(1, text, 0, "dead", float("-inf"))]
    svg = draw_forest([BlockPicture(1, 0, nodes, [Column(4, None)])], text)
    root = ET.fromstring(svg.encode())
    shown = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert all(len(one) < 120 for one in shown)
    assert "<script" not in svg
    assert "\u202e" not in svg  # would turn the rest of the line around


def test_blanks_are_seen() -> None:
    assert visible(" a\n") == "\u2423a\u21b5"
    assert visible(" a\n", spaces=True) == " a\ufffd"


def test_generate_draws_its_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = save_tiny_folder(tmp_path / "target", make_tiny_llama(0, vocab_size=48, scale=0.3))
    out = tmp_path / "forest.svg"
    options = ["--target", str(target), "--drafter", "lookup", "--max-new-tokens", "6", "--num-beams", "2"]
    assert main(["generate", "--prompt", "one two one two", *options]) == 0
    text = capsys.readouterr().out
    assert main(["generate", "--prompt", "one two one two", *options, "--view", str(out)]) == 0
    assert capsys.readouterr().out == text
    assert "one two one two" in (ET.parse(out).getroot()[0].text or "")
    (tmp_path / "p.jsonl").write_text('{"prompt": "one"}\n')
    assert main(["generate", "--prompts", str(tmp_path / "p.jsonl"), *options, "--view", str(out)]) == 2
    assert "--view" in capsys.readouterr().err
    assert main(["generate", "--prompt", "one", *options, "--view", str(tmp_path / "no" / "x.svg")]) == 2
    assert "--view" in capsys.readouterr().err


def test_bench_draws_its_first_prompts(tmp_path: Path) -> None:
    options = make_options(tmp_path, make_tiny_llama, methods=["target_only", "fixed"], baseline="target only", view=2)
    bench(options)
    forests = sorted((tmp_path / "out" / "forests").glob("*.svg"))
    assert [path.name for path in forests] == ["01_p.svg", "02_p.svg"]
    assert "fixed 1xauto, W=2 greedy float32 cpu" in (ET.parse(forests[0]).getroot()[0].text or "")
    assert "forests/01_p.svg" in (tmp_path / "out" / "report.md").read_text()
    times = [path.stat().st_mtime_ns for path in forests]
    bench(options)
    assert [path.stat().st_mtime_ns for path in forests] == times
