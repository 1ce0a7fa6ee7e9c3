"""The forests of a benchmark's first prompts, as files of its report."""

from __future__ import annotations

from pathlib import Path

from beamwise.commands.output import open_output
from beamwise.decoding.prompts import encode_prompt

from .forest import ForestLog
from .forest_svg import draw_forest
from .methods import TARGET_ONLY
from .runner import Load, Plan
from .settings import UnavailableError


def draw_forests(plan: Plan, folder: Path, load: Load, count: int) -> None:
    """Decode the first prompts once more, by the controller or else the first method that drafts, and draw its forests.

    Args:
        plan: of the benchmark; its first setting with several beams, if there is one, is taken.
        folder: for the SVG files, one for each prompt; those that are there already are kept.
        load: the benchmark's.
        count: of prompts.
    """
    paths = {folder / f"{number:02d}_{one.source}.svg": one for number, one in enumerate(plan.prompts[:count], 1)}
    missing = {path: one for path, one in paths.items() if not path.exists()}
    if not missing:
        return
    setting = next((one for one in plan.settings if one.num_beams > 1), plan.settings[0])
    models = load(setting.dtype, setting.device)
    tokenizer = models.tokenizer
    for method in sorted(plan.methods, key=lambda method: not method.name.startswith("learned")):
        try:
            decoder = method.make(models, setting, plan.options)
        except UnavailableError:
            continue
        if method.name == TARGET_ONLY or decoder.observe is None:
            continue
        folder.mkdir(exist_ok=True)
        for path, one in missing.items():
            log = ForestLog(lambda token: str(tokenizer.decode([token])))
            decoder.observe(log)
            decoder.decode(encode_prompt(tokenizer, one.prompt.text))
            title = f"{one.source}, {one.prompt.id}: {method.name}, {setting.name}"
            with open_output(str(path)) as file:
                file.write(draw_forest(log.blocks, title))
        return
