# SPDX-License-Identifier: Apache-2.0
"""Seeded request generator: three kinds of problem, two kinds of open text.

Problems have one right answer and end with ``#### n``. Open text (``list``,
``description``) is drawn word by word from distributions that depend on earlier
words of the same answer. A parallel drafter does not know those words yet, so its
acceptance is low for the reason it is low in real text: entropy, not noise.

Invariants (pinned by tests): equal seeds give equal documents; no training
question is a held-out question; every ``<<a op b=c>>`` is arithmetically true.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from statistics import NormalDist


def _words(text: str) -> list[str]:
    return text.split()


HE = _words("Tom Sam Ben Leo Max Jack Omar Paul")
SHE = _words("Mia Ana Zoe Lucy Emma Nina Rosa Kate")
NAMES = HE + SHE
OBJECTS = _words("apples books cards coins shells stamps beads eggs toys pens")
BOXES = _words("boxes bags jars trays")
DAYS = _words("Monday Tuesday Friday Sunday")
ADJECTIVES = _words(
    "red old quiet tall bright small wet golden dusty strange gentle heavy broken "
    "warm narrow silver dark soft round empty"
)
NOUNS = _words(
    "lamp dog horse clock window train boat mirror piano door chair wheel flag drum "
    "rope bell fox kite"
)
PLACES = _words("river garden market forest street lake field tower bridge hill")
VERBS = _words("stands waits shines sleeps moves rests turns hides drifts glows")
PREPOSITIONS = _words("near behind beside above under beyond")
ADVERBS = _words("slowly again alone today often softly")
MATERIALS = _words("iron paper glass wooden stone cotton leather copper")
OPENERS = _words("So Then Next Now Thus Here")

SHARPNESS = 1.5
"""Log-weight per unit of affinity. Two contexts of 1.5 leave the best of 16 words
about one half of the probability: high entropy, yet a clear greedy choice."""


@dataclass(frozen=True)
class Document:
    """One request and its reference answer."""

    kind: str
    question: str
    answer: str

    @property
    def prompt(self) -> str:
        """The text given to the model; the answer follows after one space."""
        return f"Question: {self.question}\nAnswer:"


@cache
def affinity(context: str, option: str) -> float:
    """Return a fixed standard-normal score of ``option`` after ``context``.

    A hash, not a table: the same in every process and free of any file.
    """
    digest = blake2b(f"{context}|{option}".encode(), digest_size=6).digest()
    return NormalDist().inv_cdf((int.from_bytes(digest, "big") + 0.5) / 2**48)


def pick(rng: random.Random, options: Sequence[str], *context: str) -> str:
    """Draw one option with weight ``exp(SHARPNESS * sum of affinities)``.

    Args:
        rng: source of randomness.
        options: candidate words, not empty.
        context: earlier words of the same text that the choice depends on.

    Returns:
        The drawn word.
    """
    scores = [sum(affinity(word, option) for word in context) for option in options]
    return rng.choices(options, [math.exp(SHARPNESS * score) for score in scores])[0]


class _Pool:
    """Words that one text may use once each; per pick: draw, remove."""

    def __init__(self, words: Sequence[str]) -> None:
        self._left = list(words)

    def pick(self, rng: random.Random, *context: str) -> str:
        word = pick(rng, self._left, *context)
        self._left.remove(word)
        return word


def _calc(a: int, op: str, b: int) -> tuple[str, int]:
    """Return the annotated calculation text and its value."""
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[op]
    return f"{a}{op}{b} = <<{a}{op}{b}={value}>>{value}", value


def _pronoun(name: str) -> str:
    return "he" if name in HE else "she"


def arithmetic(rng: random.Random) -> Document:
    """One calculation: add, subtract, multiply or share."""
    name, thing = rng.choice(NAMES), rng.choice(OBJECTS)
    form = rng.randrange(4)
    if form == 0:
        a, b = rng.randint(5, 89), rng.randint(5, 89)
        fact, op = f"{name} has {a} {thing} and buys {b} more.", "+"
    elif form == 1:
        a = rng.randint(20, 99)
        b = rng.randint(5, a - 5)
        fact, op = f"{name} has {a} {thing} and gives away {b}.", "-"
    elif form == 2:
        a, b = rng.randint(3, 19), rng.randint(3, 9)
        fact, op = f"{name} has {a} {rng.choice(BOXES)} with {b} {thing} in each.", "*"
    else:
        b = rng.randint(2, 9)
        a = b * rng.randint(3, 19)
        fact, op = f"{name} shares {a} {thing} equally among {b} friends.", "/"
    asked = f"How many {thing} does " + ("each get?" if op == "/" else f"{name} have?")
    text, value = _calc(a, op, b)
    subject = "Each friend gets" if op == "/" else f"{name} has"
    answer = f"{subject} {text} {thing}.\n#### {value}"
    return Document("arithmetic", f"{fact} {asked}", answer)


def _change(
    rng: random.Random, name: str, thing: str, value: int
) -> tuple[str, str, int]:
    """Return one change of ``value``: its fact, its answer line, the new value."""
    he = _pronoun(name)
    op = rng.choice("++--*" if 30 <= value <= 200 else "++*" if value < 30 else "--")
    if op == "*":
        factor = rng.randint(2, 4)
        text, new = _calc(value, op, factor)
        fact = f"Then {he} gets {factor} times as many."
        return fact, f"{he.capitalize()} now has {text} {thing}.", new
    amount = rng.randint(3, 60 if op == "+" else max(3, min(value - 5, 99)))
    text, new = _calc(value, op, amount)
    form = rng.randrange(3)
    if op == "+":
        fact = (
            f"Then {he} buys {amount} more.",
            f"Then {he} finds {amount} {thing}.",
            f"On {rng.choice(DAYS)} {he} collects {amount}.",
        )[form]
        line = ("After buying more,", "With the new ones,", "By then")[form]
    else:
        fact = (
            f"Then {he} loses {amount}.",
            f"Then {he} sells {amount} {thing}.",
            f"On {rng.choice(DAYS)} {he} gives away {amount}.",
        )[form]
        line = ("After losing some,", "After the sale,", "After the gift,")[form]
    return fact, f"{line} {he} has {text} {thing}.", new


def word_problem(rng: random.Random) -> Document:
    """Two to four changes of one quantity, told and solved in the same order."""
    name, thing = rng.choice(NAMES), rng.choice(OBJECTS)
    value = rng.randint(8, 99)
    facts, lines = [f"{name} has {value} {thing}."], []
    for _ in range(rng.randint(2, 4)):
        fact, line, value = _change(rng, name, thing, value)
        facts.append(fact)
        lines.append(line)
    facts.append(f"How many {thing} does {name} have now?")
    lines.append(f"#### {value}")
    return Document("word_problem", " ".join(facts), "\n".join(lines))


def puzzle(rng: random.Random) -> Document:
    """A chain of comparisons told in random order; the solver finds the order."""
    names = rng.sample(NAMES, rng.randint(4, 5))
    thing = rng.choice(OBJECTS)
    value = rng.randint(8, 60)
    facts = [f"{names[0]} has {value} {thing}."]
    lines = [f"{names[0]} has {value}."]
    for before, name in zip(names, names[1:], strict=False):
        op = rng.choice("+-" if value >= 30 else "+*")
        if op == "*":
            amount = rng.randint(2, 5)
            facts.append(f"{name} has {amount} times as many as {before}.")
        else:
            amount = rng.randint(3, 75 if op == "+" else value - 5)
            word = "more" if op == "+" else "fewer"
            facts.append(f"{name} has {amount} {word} than {before}.")
        text, value = _calc(value, op, amount)
        lines.append(f"{pick(rng, OPENERS, before, name)} {name} has {text}.")
    rng.shuffle(facts)
    facts.append(f"How many {thing} does {names[-1]} have?")
    lines.append(f"#### {value}")
    return Document("puzzle", " ".join(facts), "\n".join(lines))


def item_list(rng: random.Random) -> Document:
    """A numbered list of things; each word leans on the two words before it."""
    count, name, place = rng.randint(6, 8), rng.choice(NAMES), rng.choice(PLACES)
    day = rng.choice(DAYS)
    question = f"List {count} things that {name} takes to the {place} on {day}."
    adjectives, nouns = _Pool(ADJECTIVES), _Pool(NOUNS)
    before, noun, items = name, place, []
    for index in range(1, count + 1):
        adjective = adjectives.pick(rng, before, noun)
        material = pick(rng, MATERIALS, noun, adjective)
        noun = nouns.pick(rng, adjective, material)
        items.append(f"{index}. {adjective} {material} {noun}")
        before = adjective
    return Document("list", question, "\n".join(items))


def description(rng: random.Random) -> Document:
    """Sentences about the named things, in an order that the text itself leads to."""
    named = rng.sample(NOUNS, rng.randint(4, 6))
    question = f"Describe the {', the '.join(named[:-1])} and the {named[-1]}."
    adjectives, nouns = _Pool(ADJECTIVES), _Pool(named)
    places = _Pool(PLACES)
    last, place, sentences = named[0], named[-1], []
    for _ in named:
        adjective = adjectives.pick(rng, last, place)
        noun = nouns.pick(rng, adjective, place)
        verb = pick(rng, VERBS, adjective, noun)
        if pick(rng, ("long", "short"), verb, noun) == "short":
            adverb = pick(rng, ADVERBS, noun, verb)
            sentences.append(f"The {adjective} {noun} {verb} {adverb}.")
            last = adverb
            continue
        preposition = pick(rng, PREPOSITIONS, noun, verb)
        last = adjectives.pick(rng, verb, preposition)
        place = places.pick(rng, preposition, last)
        sentences.append(
            f"The {adjective} {noun} {verb} {preposition} the {last} {place}."
        )
    return Document("description", question, " ".join(sentences))


GENERATORS: dict[str, tuple[Callable[[random.Random], Document], float]] = {
    "arithmetic": (arithmetic, 0.10),
    "word_problem": (word_problem, 0.25),
    "puzzle": (puzzle, 0.25),
    "list": (item_list, 0.18),
    "description": (description, 0.22),
}
"""Kind -> (generator, share of the training documents)."""
KINDS = tuple(GENERATORS)
PROBLEM_KINDS = ("arithmetic", "word_problem", "puzzle")


def make_documents(
    count: int, seed: str, *, avoid: Collection[str] = frozenset()
) -> list[Document]:
    """Draw documents of the training mix.

    Args:
        count: how many documents.
        seed: any text; equal seeds give equal documents.
        avoid: questions that must not occur.

    Returns:
        ``count`` documents; open-text questions may repeat with other answers.
    """
    rng = random.Random(seed)
    shares = [share for _, share in GENERATORS.values()]
    documents: list[Document] = []
    while len(documents) < count:
        kind = rng.choices(KINDS, shares)[0]
        document = GENERATORS[kind][0](rng)
        if document.question not in avoid:
            documents.append(document)
    return documents


def make_heldout(per_kind: int, seed: str) -> list[Document]:
    """Draw ``per_kind`` documents of every kind, no question twice, kinds in turn."""
    rng = random.Random(seed)
    seen: set[str] = set()
    documents: list[Document] = []
    for _ in range(per_kind):
        for generator, _share in GENERATORS.values():
            document = generator(rng)
            while document.question in seen:
                document = generator(rng)
            seen.add(document.question)
            documents.append(document)
    return documents
