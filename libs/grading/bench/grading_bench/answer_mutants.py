"""Wrong variants of published references by kind of mutation, and equal rewritings, each labelled by its values.

Generated from the data and a fixed seed. A variant whose label is unknown, or that says the same, is left out.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from grading_bench.answer_corpus import Labelled
from grading_bench.answer_forms import UNITS, Form, equivalent, form_of
from grading_bench.answer_references import made_references, references, systems
from grading_bench.latex_values import names_in, same_value, value_at

Mutation = Callable[[str, Form, random.Random], Iterator[str]]
SEED = 20
MOST = 130
"""Mutants of one kind."""

_NAME = re.compile(r"(?<![\\A-Za-z{])(?!e(?![A-Za-z])|i(?![A-Za-z])|sqrt|pi|sin|cos|tan|log|ln)[A-Za-z](?![A-Za-z({])")
_DIGITS = re.compile(r"\d+")
_FRACTION = re.compile(r"\\frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}")
_DERIVATIVE = re.compile(r"\\frac\s*\{\s*d ?\\?[A-Za-z]")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def _replaced(text: str, found: re.Match[str], by: str) -> str:
    return text[: found.start()] + by + text[found.end() :]


def _one(pattern: str | re.Pattern[str], text: str, rng: random.Random) -> re.Match[str] | None:
    matches = list(re.finditer(pattern, text))
    return rng.choice(matches) if matches else None


def _digit(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if found := _one(r"\d", gold, rng):
        yield _replaced(gold, found, rng.choice([d for d in "123456789" if d != found[0]]))


def _sign(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if form.kind in ("value", "measured"):
        yield (
            gold[1:].strip() if gold.startswith("-") else f"-{gold}" if not re.search(r"[+\-]", gold) else f"-({gold})"
        )


def _off_by_one(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if re.fullmatch(r"-?[\d,]+", gold):
        yield str(int(gold.replace(",", "")) + rng.choice([-1, 1]))
    elif form.kind == "value":
        yield f"{gold}+1"


def _point(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if re.fullmatch(_NUMBER, gold):
        yield f"{gold}0" if "." not in gold else gold.replace(".", "").lstrip("0")
        yield f"{gold[:-1]}.{gold[-1]}" if "." not in gold and len(gold) > 1 else f"{gold}e1"


def _swapped(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if found := _one(r"(\d)(\d)", gold, rng):
        yield _replaced(gold, found, found[2] + found[1])


def _dropped_digit(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if found := _one(r"(?<=\d)\d|\d(?=\d)", gold, rng):
        yield _replaced(gold, found, "")


def _inverted(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if found := _one(_FRACTION, gold, rng):
        yield _replaced(gold, found, rf"\frac{{{found[2]}}}{{{found[1]}}}")
    elif form.kind == "value":
        yield rf"\frac{{1}}{{{gold}}}"


def _numerator(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if found := _one(_FRACTION, gold, rng):
        yield _replaced(gold, found, rf"\frac{{{rng.choice(['2', '3'])} \cdot {found[1]}}}{{{found[2]}}}")


def _denominator(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if found := _one(_FRACTION, gold, rng):
        yield _replaced(gold, found, rf"\frac{{{found[1]}}}{{{found[2]}+{rng.randrange(1, 4)}}}")


def _rounded(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if form.kind == "value" and not names_in(gold) and abs((value := value_at(gold, {})).imag) < 1e-12:
        yield f"{value.real:.3g}" if 1e-3 < abs(value.real) < 1e3 else f"{value.real:.2e}"
        yield f"{value.real:.5f}"


def _operator(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if found := _one(r"(?<=[\w)}]) ?([+-])", gold, rng):
        yield _replaced(gold, found, "-" if found[1] == "+" else "+")


def _renamed(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if found := _one(_NAME, gold, rng):
        yield _replaced(gold, found, rng.choice([each for each in "xyztabw" if each != found[0].lower()]))
        others = [each for each in "xyztabw" if each not in gold]
        yield re.sub(rf"(?<![\\A-Za-z]){found[0]}(?![A-Za-z])", others[0], gold)


def _dropped_name(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if found := _one(_NAME, gold, rng):
        yield _replaced(gold, found, "").strip()


def _added_name(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if form.kind == "value" and not re.search(r"[+\-/%°=]", gold[1:]):
        yield gold + rng.choice(["ab", "x", "xy", "pq", " n!", " cd", "t", " mn", r"\pi ab", " x^2", "r^2h"])


def _exponent(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if found := _one(r"\^\s*(?:\{\s*(\d+)\s*\}|(\d))", gold, rng):
        yield _replaced(gold, found, f"^{{{int(found[1] or found[2]) + 1}}}")
        yield _replaced(gold, found, "")
    elif form.kind == "value" and re.fullmatch(r"[\w.]+", gold):
        yield f"{gold}^2"


def _root(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if found := _one(r"\\sqrt\s*\{([^{}]*)\}", gold, rng):
        yield _replaced(gold, found, f"({found[1]})")
        yield _replaced(gold, found, rf"\sqrt[3]{{{found[1]}}}")
    elif form.kind == "value":
        yield rf"\sqrt{{{gold}}}"


def _constant(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if found := _one(r"\\pi(?![A-Za-z])|(?<![\\A-Za-z])[ei](?![A-Za-z])", gold, rng):
        yield _replaced(gold, found, rng.choice(["e ", "3.14", r"\pi "]))
        yield re.sub(r"\{\}", "{1}", _replaced(gold, found, "")).strip() or "1"
    elif form.kind == "value" and not re.search(r"[+\-]", gold):
        yield rf"{gold} \pi"


def _function(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    others = {"sin": "cos", "cos": "sin", "tan": "sin", "ln": "log", "log": "ln", "exp": "ln"}
    if found := _one(r"\\(sin|cos|tan|ln|log|exp)(?![A-Za-z_])", gold, rng):
        yield _replaced(gold, found, "\\" + others[found[1]])
    elif form.kind == "value":
        yield rf"\{rng.choice([*others])}({gold})"


def _brackets(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if form.kind in ("value", "equation") and (found := _one(r"\(([^()]*[+-][^()]*)\)", gold, rng)):
        yield _replaced(gold, found, f" {found[1]}")


def _left(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if form.kind == "equation":
        yield f"{form.parts[0]}+1={form.parts[1]}"
        yield f"2({form.parts[0]})={form.parts[1]}"


def _right(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if form.kind == "equation":
        yield f"{form.parts[0]}={form.parts[1]}+{rng.randrange(1, 5)}"
        yield f"{form.parts[0]}=2({form.parts[1]})"


def _bracket_kind(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if form.kind in ("interval", "union"):
        swaps = {"(": "[", "[": "(", ")": "]", "]": ")"}
        if found := _one(r"^(?:\\left)?\s*[(\[](?!\s*-\\inf)|(?<!\\infty)[)\]]$", gold, rng):
            yield _replaced(gold, found, found[0][:-1] + swaps[found[0][-1]])


def _endpoint(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if form.kind in ("interval", "union", "tuple"):
        ends = [part for part in form.parts if "\\infty" not in part]
        if ends:
            yield gold.replace(rng.choice(ends), str(rng.randrange(20, 90)), 1)
        if "\\infty" in gold:
            yield re.sub(r"[+-]?\s*\\infty", str(rng.randrange(100, 200)), gold, count=1)


def _dropped_item(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if form.kind in ("list", "set", "tuple") and len(form.parts) > 1:
        kept = list(form.parts)
        del kept[rng.randrange(len(kept))]
        yield _enclosed(form, kept)
    if form.kind == "union":
        yield gold.rpartition("\\cup")[0].strip()


def _added_item(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if form.kind in ("value", "list", "set", "tuple"):
        yield _enclosed(form, [*form.parts, str(rng.randrange(100, 999))])


def _order(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if form.kind == "tuple":
        yield _enclosed(form, [*form.parts[1:], form.parts[0]])


def _enclosed(form: Form, items: list[str]) -> str:
    text = ", ".join(items)
    return rf"\{{{text}\}}" if form.kind == "set" else f"({text})" if form.kind == "tuple" else text


_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\leq": r"\geq", r"\ge": r"\le", r"\geq": r"\leq"}
_STRICT = {"<": r"\leq ", ">": r"\geq ", r"\le": "< ", r"\leq": "< ", r"\ge": "> ", r"\geq": "> "}
_RELATION = r"[<>]|\\[lg]eq?(?![A-Za-z])"


def _flipped(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if form.kind == "inequality":
        yield re.sub(_RELATION, lambda found: _FLIPPED[found[0]], gold)


def _strictness(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if form.kind == "inequality" and (found := _one(_RELATION, gold, rng)):
        yield _replaced(gold, found, _STRICT[found[0]])


def _bound(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if form.kind == "inequality" and (found := _one(_NUMBER, gold, rng)):
        yield _replaced(gold, found, str(rng.randrange(20, 99)))


BY_VALUE: dict[str, Mutation] = {
    "a digit changed": _digit,
    "sign": _sign,
    "off by one": _off_by_one,
    "decimal point moved": _point,
    "digits swapped": _swapped,
    "digit dropped": _dropped_digit,
    "fraction inverted": _inverted,
    "numerator": _numerator,
    "denominator": _denominator,
    "rounded": _rounded,
    "operator": _operator,
    "variable renamed": _renamed,
    "variable dropped": _dropped_name,
    "variables added": _added_name,
    "exponent": _exponent,
    "root": _root,
    "pi, e or i replaced": _constant,
    "function": _function,
    "brackets dropped": _brackets,
    "left side of an equation": _left,
    "right side of an equation": _right,
    "kind of bracket": _bracket_kind,
    "end of an interval": _endpoint,
    "item dropped": _dropped_item,
    "item added": _added_item,
    "order of a tuple": _order,
    "relation flipped": _flipped,
    "strictness of a relation": _strictness,
    "bound of a relation": _bound,
}
"""Mutations whose result is labelled by its values."""


def mutants(data: Path, most: int = MOST) -> list[Labelled]:
    """Wrong answers in a box, by kind of mutation; at most `most` of each kind."""
    rng = random.Random(SEED)
    plain = references(data)
    golds = [*plain, *made_references(plain, rng)]
    made = []
    for kind, mutate in BY_VALUE.items():
        found = dict.fromkeys(pair for gold in golds for pair in _of_reference(gold, mutate, rng))
        made += [Labelled(kind, "math", *pair, False) for pair in _some([*found], most, rng)]
    made += [Labelled(kind, "math", gold, text, False) for kind, gold, text in _contradictions(plain, golds, rng, most)]
    return made


def _of_reference(gold: str, mutate: Mutation, rng: random.Random) -> Iterator[tuple[str, str]]:
    form = form_of(gold)
    if form is None:
        return
    for text in mutate(gold, form, rng):
        if re.sub(r"\s", "", text) != re.sub(r"\s", "", gold) and _differs(gold, text):
            yield gold, box(text)


def _differs(gold: str, text: str) -> bool:
    """True if a variant is certainly wrong. Derivatives, primes and function values are names on both sides."""
    apart = r"\\frac\{dy\}\{dx\}|y'|f\(2\)"
    return equivalent(re.sub(apart, "Q", gold), re.sub(apart, "Q", text)) is False


def _some(pairs: list[tuple[str, str]], most: int, rng: random.Random) -> list[tuple[str, str]]:
    return pairs if len(pairs) <= most else rng.sample(pairs, most)


def box(text: str) -> str:
    """A completion with the answer in a box."""
    return f"So the answer is $\\boxed{{{text}}}$."


def _contradictions(
    plain: list[str], golds: list[str], rng: random.Random, most: int
) -> Iterator[tuple[str, str, str]]:
    """Answers that contradict themselves, and other ones that are wrong by construction: (kind, reference, text)."""
    values = [each for each in plain if (form := form_of(each)) is not None and form.kind == "value" and len(each) < 60]
    for gold, other in _different(values, rng, most):
        yield "a false side added", gold, box(f"{gold} = {other}")
        if not names_in(gold) and not names_in(other) and _far(gold, other):
            yield "contradictory approximation", gold, box(rf"{gold} \approx {other}")
        wait = rng.choice(["Wait, that is wrong. ", "Let me recompute: ", "Hmm, no. ", "Actually, "])
        yield "the last box wrong", gold, f"We get $\\boxed{{{gold}}}$. {wait}It is $\\boxed{{{other}}}$."
        yield "the last box cut off", gold, f"We get $\\boxed{{{gold}}}$. {wait}It is $\\boxed{{{other[:9]}"
        yield "offered beside another", gold, box(rf"{other} \text{{ or }} {gold}")
    for gold, other in _different(values, rng, most // 2):
        yield "derivative", rf"\frac{{dy}}{{dx}}={gold}", box(rf"\frac{{dy}}{{dx}}={other}")
        yield "integral", rf"\int_0^1 f(x) dx={gold}", box(rf"\int_0^1 f(x) dx={other}")
    for one, two, between in systems(plain, rng, most):
        wrong = rng.choice(values)
        if same_value(one, wrong) is False:
            yield "one of two statements", f"x={one}{between}y={two}", box(f"x={wrong}{between}y={two}")
    for _ in range(most // 4):
        ours, theirs = rng.sample(range(1, 40), 2)
        powers = rng.sample([2, 4, 6], 2)
        other = rng.choice([f"x^{powers[1]}+{theirs}=0", f"e^x=-{theirs}"])
        yield "no real solution", f"x^{powers[0]}+{ours}=0", box(other)
    for number in rng.sample(range(2, 99), min(most // 4, 90)):
        yield (
            "unit",
            rf"{number} \text{{ cm}}",
            box(rf"{number} \text{{ {rng.choice([u for u in UNITS if u != 'cm'])}}}"),
        )
        yield "points outside the reals", r"(-\infty,\infty)", box(rf"\mathbb{{R}} \setminus \{{{number}\}}")


def _different(values: list[str], rng: random.Random, count: int) -> Iterator[tuple[str, str]]:
    """Pairs of values that differ at all points."""
    for gold in _some([(each, each) for each in values], count, rng):
        other = next((each for each in rng.sample(values, 20) if same_value(gold[0], each) is False), None)
        if other is not None:
            yield gold[0], other


def _far(one: str, other: str) -> bool:
    """True if two numbers differ by more than an approximation may."""
    first, second = value_at(one, {}), value_at(other, {})
    return abs(first - second) > 0.2 * max(abs(first), abs(second))


# Equal rewritings.


def rewritings(data: Path, most: int = MOST) -> list[Labelled]:
    """Right answers in a box, written otherwise than the reference, by kind of rewriting."""
    rng = random.Random(SEED)
    plain = references(data)
    golds = [*plain, *made_references(plain, rng)]
    made = []
    for kind, rewrite in REWRITINGS.items():
        found = []
        for gold in golds:
            form = form_of(gold)
            found += [(gold, text) for text in (rewrite(gold, form, rng) if form is not None else ())]
        equal = [pair for pair in dict.fromkeys(found) if pair[0] != pair[1] and equivalent(*pair) is True]
        made += [Labelled(kind, "math", gold, box(text), True) for gold, text in _some(equal, most, rng)]
    for one, two, between in systems(plain, rng, most):
        made.append(Labelled("statements joined", "math", f"x={one}, y={two}", box(f"x={one}{between}y={two}"), True))
    return made


def _layout(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    yield gold.replace(r"\frac", r"\dfrac")
    yield re.sub(r"(?<!left)\(([^()]*)\)", r"\\left(\1\\right)", gold) if "\\left" not in gold else gold
    yield re.sub(r"(?<=[\w}]) ?([+=-]) ?", r" \1 ", gold)


def _decimal(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if form.kind == "value" and not names_in(gold):
        value = value_at(gold, {})
        if abs(value.imag) < 1e-12 and abs(value.real * 1e4 - round(value.real * 1e4)) < 1e-9:
            yield f"{value.real:.6f}".rstrip("0").rstrip(".")
    if re.fullmatch(r"-?\d+", gold):
        yield f"{gold}.0"


def _slashed(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if (found := _one(_FRACTION, gold, rng)) and not _DERIVATIVE.search(gold):
        ends = found.end() == len(gold) or gold[found.end() :].lstrip()[0] in "+-=<>,)]"
        yield _replaced(gold, found, f"({found[1]})/({found[2]})" if ends else f"(({found[1]})/({found[2]}))")


def _commuted(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if form.kind == "value" and (found := re.fullmatch(r"([^+\-()e]+)([+-])([^+\-()]+)", gold)):
        yield f"{found[2] if found[2] == '-' else ''}{found[3].strip()}+{found[1].strip()}"


def _expanded(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if (found := _one(_FRACTION, gold, rng)) and not _DERIVATIVE.search(gold):
        yield _replaced(gold, found, rf"\frac{{2({found[1]})}}{{2({found[2]})}}")
    elif form.kind == "value":
        yield rf"\frac{{3({gold})}}{{3}}"


def _moved(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if form.kind == "equation" and "'" not in gold and not _DERIVATIVE.search(gold):
        yield f"{form.parts[1]}={form.parts[0]}"
        yield f"{form.parts[0]}-({form.parts[1]})=0"


def _permuted(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if form.kind in ("set", "list") and not re.search(r"\d,\d{3}", gold):
        yield _enclosed(form, [*reversed(form.parts)])


def _turned(gold: str, form: Form, rng: random.Random) -> Iterator[str]:
    if form.kind == "inequality":
        signs = {"<": ">", ">": "<", "<=": r"\geq", ">=": r"\leq", "!=": r"\neq"}
        parts, marks = form.parts[::-1], [signs[mark] for mark in form.marks[::-1]]
        yield " ".join(part for pair in zip(parts, [*marks, ""], strict=True) for part in pair).strip()


REWRITINGS: dict[str, Mutation] = {
    "layout": _layout,
    "decimals": _decimal,
    "fractions with a slash": _slashed,
    "terms exchanged": _commuted,
    "fractions expanded": _expanded,
    "equation turned round": _moved,
    "items in another order": _permuted,
    "relation turned round": _turned,
}
