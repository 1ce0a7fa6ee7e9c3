"""The report: one page that needs nothing else, plots, Markdown, figures that agree with the rows."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from beamwise.benchmarks.html import Heading, Image, Paragraph, Section, Table, to_html, to_markdown
from beamwise.benchmarks.report import FORESTS, write_report
from beamwise.benchmarks.runner import Part
from beamwise.cli import main
from beamwise.commands.bench import bench, describe, make_plan, select_prompts
from tests.benchmarks.tiny_bench import make_options

Make = Callable[..., LlamaForCausalLM]
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><circle r="4"/></svg>'


class Page(HTMLParser):
    """Tags that are open and what the page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.loads: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "img", "circle"):
            self.open.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]

    def handle_endtag(self, tag: str) -> None:
        if tag != "circle":
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Make) -> Path:
    options = make_options(
        tmp_path_factory.mktemp("report"),
        tiny_llama,
        methods=["transformers", "target_only", "fixed", "paper", "learned"],
    )
    (Path(options.out) / "parts").mkdir(parents=True)
    prompts = select_prompts(options)
    asked = describe(options, prompts)
    (Path(options.out) / "config.json").write_text(json.dumps(asked))
    (Path(options.out) / FORESTS).mkdir()
    (Path(options.out) / FORESTS / "prompt_a.svg").write_text(SVG)
    bench(options)
    return Path(options.out)


def test_the_page_is_whole_and_loads_nothing(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert page.open == []  # every tag is closed
    assert "script" not in page.tags
    assert page.loads
    assert all(load.startswith("data:image/") for load in page.loads)
    assert "default-src 'none'" in text
    assert not re.search(r"url\(|@import", text)
    plots = list((folder / "plots").glob("*.png"))
    forests = list((folder / FORESTS).glob("*.svg"))
    assert page.tags.count("img") == len(plots) + len(forests)
    assert len(forests) == 2  # the one put there, and that of the first prompt
    words = " ".join(page.words)
    for wanted in ("W=2 sampling float32 cpu", "fixed 1xauto", "not measured", "skipped: there is no controller"):
        assert wanted in words


def test_it_renders_in_a_browser(folder: Path, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine; the page's structure is tested without it")
    command = [chromium, "--headless", "--no-sandbox", f"--user-data-dir={tmp_path}", "--dump-dom"]
    page = (folder / "report.html").resolve().as_uri()
    done = subprocess.run(
        [*command, page], capture_output=True, text=True, timeout=120, check=True, env=dict(os.environ)
    )
    assert "Where the time goes" in done.stdout


def test_markdown_and_its_plots(folder: Path) -> None:
    text = (folder / "report.md").read_text()
    links = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    assert {Path(link).parts[0] for link in links} == {"plots", FORESTS}
    for link in links:
        start = (folder / link).read_bytes()[:8]
        assert start == b"\x89PNG\r\n\x1a\n" or link.endswith(".svg")
    for name in ("pareto_log_likelihood", "pareto_f1", "acceptance", "categories_greedy_float32_cpu", "time_sampling"):
        assert any(name in link for link in links)
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_the_summary_agrees_with_the_rows(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    rows = Part.load(folder / "results.parquet").rows
    for entry in summary["settings"]:
        assert list(entry["methods"]) == ["transformers", "target only", "fixed 1xauto", "paper's rule 1xauto"]
        for method, figures in entry["methods"].items():
            mine = [row for row in rows if (row.setting, row.method) == (entry["name"], method)]
            rate = sum(row.positions for row in mine) / sum(row.seconds for row in mine)
            assert figures["tokens_per_second"] == pytest.approx(rate)
            assert figures["joules_per_token"] is None
        assert entry["methods"]["transformers"]["ratio"] == [1.0, 1.0, 1.0]
        assert set(entry["categories"]) == {"gsm8k", "context_qa", "lists"}
        assert entry["categories"]["lists"]["target only"]["prompts"] == 2


def test_nothing_half_written_is_left(folder: Path) -> None:
    assert not list(folder.rglob("*.writing"))


def test_more_sections(folder: Path, tmp_path: Path, tiny_llama: Make) -> None:
    """The hook for a simulator's tables and the like."""
    options = make_options(tmp_path, tiny_llama, methods=["transformers"], num_beams=[1], sampling="greedy")
    page = bench(options)
    prompts = select_prompts(options)
    plan = make_plan(options, prompts)
    part = Part.load(next((tmp_path / "out" / "parts").glob("*.parquet")))
    parts = {plan.settings[0].name: part}
    asked = describe(options, prompts)
    write_report(tmp_path / "out", plan, parts, part.rows, asked, "transformers", [Section("What if", SVG)])
    assert SVG in page.read_text()
    assert "What if" not in (tmp_path / "out" / "report.md").read_text()


def test_words_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "a.svg").write_text(SVG)
    blocks = [
        Heading("a < b"),
        Paragraph("<script>alert(1)</script>"),
        Table(["x|y"], [["<b>"]]),
        Image(tmp_path / "a.svg", '"quoted"'),
    ]
    page = Page(to_html(blocks, "<title>"))
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert r"| x\|y |" in to_markdown(blocks, tmp_path)


def test_wandb_gets_summary_table_and_plots(tmp_path: Path, tiny_llama: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from beamwise.train import tracking

    logged: dict[str, object] = {}

    class Run:
        def __init__(self) -> None:
            self.summary = logged

        def __enter__(self) -> Run:
            return self

        def __exit__(self, *error: object) -> None: ...

        def log(self, values: dict[str, object]) -> None:
            logged.update(values)

    monkeypatch.setattr(tracking.wandb, "init", lambda **_: Run())
    options = make_options(
        tmp_path, tiny_llama, methods=["transformers", "target_only"], num_beams=[2], sampling="greedy", wandb=True
    )
    bench(options)
    assert "W=2 greedy float32 cpu/target only/tokens_per_second" in logged
    assert isinstance(logged["tables/results"], tracking.wandb.Table)
    assert len(logged["tables/results"].data) == 2
    assert any(name.startswith("plots/") for name in logged)


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--prompts", '["missing.jsonl"]', "--data", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "missing.jsonl" in error
