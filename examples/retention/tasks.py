"""English prompted tasks made from the messages: five templates, each with options to rank."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from catalogues import TITLES, Message, digest

OPTIONS = 4
#: what one application or another fills in when it shows a message
PLACEHOLDER = re.compile(r"%\(\w+\)[sd]|%[sd]|\{\w*\}")
_WORD = re.compile(r"[A-Za-z]{4,}")


@dataclass(frozen=True)
class Prompt:
    """What is asked, and answers to choose from; the first is right."""

    template: str
    inputs: str
    options: tuple[str, ...]

    @property
    def target(self) -> str:
        return self.options[0]


def _others(draw: random.Random, pool: list[str], right: str, count: int = OPTIONS - 1) -> tuple[str, ...]:
    """Up to ``count`` different texts of ``pool``, none of them ``right``."""
    chosen: dict[str, None] = {}
    for _ in range(20 * count):  # a pool may hold fewer
        other = draw.choice(pool)
        if other != right and len(chosen) < count:
            chosen[other] = None
    return tuple(chosen)


def _halves(text: str) -> tuple[str, str] | None:
    words = text.split()
    if not 6 <= len(words) <= 24:
        return None
    middle = len(words) // 2
    return " ".join(words[:middle]), " ".join(words[middle:])


def complete(messages: list[Message], draw: random.Random) -> list[Prompt]:
    """The second half of a message after its first."""
    parts = [each for message in messages if (each := _halves(message.source))]
    pool = [rest for _, rest in parts]
    return [Prompt("complete", f"Complete the message: {first}", (rest, *_others(draw, pool, rest)))
            for first, rest in parts]


def application(messages: list[Message], draw: random.Random) -> list[Prompt]:
    """Which of the five applications says this; each is asked about as often as the rarest allows."""
    groups = [[each for each in messages if each.application == name] for name in TITLES]
    fewest = min(len(group) for group in groups)
    made = []
    for (name, title), group in zip(TITLES.items(), groups):
        others = tuple(TITLES[other] for other in TITLES if other != name)
        made += [Prompt("application", f"{each.source}\nWhich application says this? {', '.join(TITLES.values())}?",
                        (title, *others)) for each in group[:fewest]]
    return made


def plural(messages: list[Message], draw: random.Random) -> list[Prompt]:
    """The plural of a message; the singular itself is among the wrong answers."""
    found = [(each.source, each.plural) for each in messages if each.plural and each.plural != each.source]
    pool = [many for _, many in found]
    return [Prompt("plural", f"One: {one}\nMany:", (many, one, *_others(draw, pool, many, OPTIONS - 2)))
            for one, many in found]


def placeholder(messages: list[Message], draw: random.Random) -> list[Prompt]:
    """What stood in the gap of a message with one placeholder."""
    found = [(each, holes[0]) for each in messages if len(holes := PLACEHOLDER.findall(each.source)) == 1]
    pool = [hole for _, hole in found]
    return [Prompt("placeholder", f"Fill the gap: {each.source.replace(hole, '___')}",
                   (hole, *_others(draw, pool, hole))) for each, hole in found]


def word(messages: list[Message], draw: random.Random) -> list[Prompt]:
    """The word that is missing from a message."""
    found = []
    for each in messages:
        places = list(_WORD.finditer(PLACEHOLDER.sub(lambda hole: " " * len(hole[0]), each.source)))
        if len(places) >= 4:
            place = draw.choice(places)
            text = f"{each.source[:place.start()]}___{each.source[place.end():]}"
            found.append((text, each.source[place.start():place.end()]))
    pool = [missing for _, missing in found]
    return [Prompt("word", f"Which word is missing? {text}", (missing, *_others(draw, pool, missing)))
            for text, missing in found]


TEMPLATES: dict[str, Callable[[list[Message], random.Random], list[Prompt]]] = {
    "complete": complete, "application": application, "plural": plural, "placeholder": placeholder, "word": word}
CHANCE = {name: 1 / (len(TITLES) if name == "application" else OPTIONS) for name in TEMPLATES}


def prompts(messages: list[Message], most: int | None = None, longest: int = 200) -> dict[str, list[Prompt]]:
    """Prompts of each template from ``messages``, at most ``most`` of each, in an order that looks random."""
    made = {}
    for name, build in TEMPLATES.items():
        options = round(1 / CHANCE[name])  # fewer where too few different answers are known
        ready = [each for each in build(messages, random.Random(name))
                 if len(each.inputs) <= longest and len(set(each.options)) == options]
        made[name] = sorted(ready, key=lambda each: digest(each.inputs))[:most]
    return made
