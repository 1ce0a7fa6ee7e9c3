"""Prompts of many kinds from a few files: what the shipped controller's traces were decoded from.

    python -m beamwise.benchmarks.prompt_mix --questions gsm8k_train.jsonl --texts t0_mixed.jsonl --out mix.jsonl

A draft that was distilled on these files has seen their prompts, and a controller that learns from the same ones would
think better of it than it deserves. So most of them, all but one in eight, ask for something else here: a story, a
poem, code, a translation, a letter. Which prompts and tasks go together is drawn with the seed.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from beamwise.decoding.prompts import read_prompts

TASKS: dict[str, str] = {
    "plain": "{text}",
    "step_by_step": "Explain to a child, step by step, how to think about this:\n{text}",
    "code": "Write a Python function for this, with comments, and an example of its use:\n{text}",
    "german": "Translate to German:\n{text}",
    "french": "Translate into French: {text}",
    "story": "Write a short story about the people and things in this text:\n{text}",
    "variation": "Write a similar text with other names, places and numbers.\n\n{text}",
    "summary": "Summarize the following in one or two sentences:\n\n{text}",
    "role": "You are an old sea captain who has seen everything. Stay in character. What do you say to this?\n{text}",
    "poem": "Write a poem of eight lines about this: {text}",
    "letter": "Write a friendly e-mail to a colleague that tells about this:\n{text}",
    "extract": "List every name and every number in this text as JSON.\n{text}",
    "context": "Context: {text}\n\nQuestion: What is this text about, and who or what matters most in it? Answer:",
    "debate": "Discuss arguments for and against what this text says:\n{text}",
    "facts": "Which general knowledge is needed to understand this? Explain the most important term.\n{text}",
}
"""What is asked of a text, by name."""


def mix(questions: list[str], texts: list[str], count: int, seed: int, longest: int = 1500) -> list[dict[str, str]]:
    """Prompts as records with id, category (the task) and prompt.

    Args:
        questions: short texts.
        texts: others; one in three prompts is made of these.
        count: prompts to make.
        seed: of what is drawn.
        longest: characters of a text that are kept.
    """
    rng = random.Random(seed)
    names = list(TASKS)
    records = []
    for number in range(count):
        text = rng.choice(texts if number % 3 == 2 else questions)[:longest].strip()
        task = rng.choice(["plain", *names])  # the plain text itself twice as often as any other
        records.append({"id": f"mix-{seed}-{number}", "category": task, "prompt": TASKS[task].format(text=text)})
    return records


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", required=True)
    parser.add_argument("--texts", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--count", type=int, default=900)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    questions, texts = ([prompt.text for prompt in read_prompts(path)] for path in (options.questions, options.texts))
    records = mix(questions, texts, options.count, options.seed)
    out = Path(options.out)
    scratch = out.with_name(f".{out.name}.writing")
    scratch.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    scratch.replace(out)


if __name__ == "__main__":
    main()
