"""Judges the rendering of chat templates: prompts, demonstrations, reasoning, tools, calls and histories of real ones.

Each of the templates that four packages ship gets a stand-in tokenizer with the family's tokens. The renderer's
prompts, learned tokens, parsed turns and continued prompts are compared with the text of transformers'
`apply_chat_template` and with what TRL's training templates mark. `wrong` is a bug; no speed is measured.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import machine
from bench.chat_templates.corpus import HOW, LICENCES, absent, templates
from bench.chat_templates.judge import FEATURES, VERDICTS, Load, TemplateFinding, judge
from bench.harness import RESULTS, ROOT, BenchError, note, with_matrix
from bench.worker import versions

PAGE = ROOT / "docs" / "guide" / "chat-templates.md"
BEGIN, END = "<!-- matrix: python -m bench templates --table -->", "<!-- end of matrix -->"
LEAST = 40  #: templates without which the result is not written
TITLES = {
    "parsing": "parsed calls",
    "turns": "several turns",
    "end": "end of turn",
}
MARKS = {"right": "✓", "absent": "–", "refused": "refused", "wrong": "**wrong**"}


def main(arguments: list[str], only_json: bool) -> int:
    """Run the benchmark; see the module's docstring. Exit code 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="bench templates", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these templates; nothing is written")
    parser.add_argument("--details", action="store_true", help="print every check that is not right")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where templates.json goes")
    parser.add_argument(
        "--table", action="store_true", help=f"only write the matrix of {PAGE.name} from the last result"
    )
    args = parser.parse_args(arguments)
    file = args.folder / "templates.json"
    if args.table:
        PAGE.write_text(with_matrix(PAGE.read_text(), matrix(json.loads(file.read_text())), BEGIN, END))
        return 0
    from rollmill.data.renderer import load_renderer

    for package, how in absent().items():
        note(f"  without the templates of {package}: {how}")
    findings = judged(args.only, load_renderer, progress=not only_json, details=args.details)
    line = summary(findings)
    if args.only is None:
        if len(findings) < LEAST:
            raise BenchError(f"only {len(findings)} of at least {LEAST} templates are here: run `make templates-setup`")
        args.folder.mkdir(parents=True, exist_ok=True)
        record = {**line, "findings": [finding.record() for finding in findings]}
        file.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(line))
    return 1 if line["wrong"] else 0


def judged(only: Sequence[str] | None, load: Load, *, progress: bool, details: bool = False) -> list[TemplateFinding]:
    """A finding for each template, in the corpus' order.

    Raises:
        BenchError: a name is of no template that is here.
    """
    known = {template.name: template for template in templates()}
    if unknown := sorted(set(only or ()) - set(known)):
        missing = "".join(f"; without {package}: {how}" for package, how in absent().items())
        raise BenchError(f"no template is called {', '.join(unknown)}{missing}")
    findings = []
    for template in known.values():
        if only is None or template.name in only:
            finding = judge(template, load)
            findings.append(finding)
            if progress:
                note(one_line(finding))
            for check in finding.checks if details else ():
                if check.verdict != "right":
                    note(f"    {check.verdict:7} {check.feature}, {check.scenario}: {check.why}")
    return findings


def summary(findings: Sequence[TemplateFinding]) -> dict[str, Any]:
    """Count templates and checks by verdict."""
    count = Counter(finding.verdict for finding in findings)
    checks = Counter(check.verdict for finding in findings for check in finding.checks)
    sources = {finding.package: finding.version for finding in findings}
    return {
        "bench": "templates",
        "peer_name": "transformers' apply_chat_template, TRL's training templates",
        **{verdict: count[verdict] for verdict in ("right", "refused", "wrong")},
        "templates": len(findings),
        "checks": {verdict: checks[verdict] for verdict in VERDICTS},
        "sources": sources,
        "versions": versions("transformers", "tokenizers", "jinja2", "trl"),
        "machine": machine.describe(),
    }


def one_line(finding: TemplateFinding) -> str:
    """Format a finding for the terminal: features that are not right, with the first reason for the worst."""
    cells = {feature: finding.cell(feature) for feature in FEATURES}
    short = " ".join(f"{feature}:{cells[feature][0]}" for feature in FEATURES if cells[feature][0] != "right")
    why = next((cell[1] for verdict in ("wrong", "refused") for cell in cells.values() if cell[0] == verdict), "")
    return f"{finding.name[:44]:44} {finding.verdict:8} {short}  {why[:200]}"


def matrix(record: dict[str, Any]) -> str:
    """Format the findings as Markdown: the table, reasons of refusals, and the sources."""
    counts = ", ".join(f"{record[verdict]} {verdict}" for verdict in ("right", "refused", "wrong"))
    checks = ", ".join(f"{count} {verdict}" for verdict, count in record["checks"].items())
    titles = [TITLES.get(feature, feature) for feature in FEATURES]
    rows = [f"| template | {' | '.join(titles)} |", f"|---{'|---' * len(titles)}|"]
    for finding in record["findings"]:
        cells = " | ".join(MARKS[finding["features"][feature]] for feature in FEATURES)
        rows.append(f"| {finding['name']} | {cells} |")
    reasons = []
    for finding in record["findings"]:
        for other in finding["others"]:
            if other["verdict"] in ("refused", "wrong"):
                scenarios = other["scenarios"]
                more = f" and {len(scenarios) - 3} more" if len(scenarios) > 4 else ""
                named = "; ".join(scenarios[:3] if more else scenarios) + more
                what = f"{other['verdict']}: {TITLES.get(other['feature'], other['feature'])}: {named}"
                reasons.append(f"| {finding['name']} | {what} | {_cell(other['why'])} |")
    parts = [
        f"transformers {record['versions']['transformers']}, {record['templates']} templates: {counts}. "
        f"Checks: {checks}.",
        "\n".join(rows),
        "✓ right. – the template cannot show it, and rollmill says so. refused: rollmill does not do what the "
        "template shows; the message is below. **wrong**: a bug.",
    ]
    if reasons:
        parts.append("\n".join(["| template | checks | message |", "|---|---|---|", *reasons]))
    parts.append(_sources(record))
    return "\n\n".join(parts)


def _sources(record: dict[str, Any]) -> str:
    count = Counter(finding["package"] for finding in record["findings"])
    rows = [
        f"| {package} {version} | {LICENCES[package]} | {count[package]} | `{HOW[package]}` |"
        for package, version in record["sources"].items()
    ]
    noted = [f"{finding['name']} ({finding['note']})" for finding in record["findings"] if finding["note"]]
    text = "\n".join(["| source | licence | templates | brought by |", "|---|---|---|---|", *rows])
    return f"{text}\n\nNot the checkpoints' own files: {', '.join(noted)}." if noted else text


def _cell(text: str) -> str:
    """Format a table cell: no line breaks, markup or bars, at most 200 characters."""
    short = " ".join(text.split())
    short = short if len(short) <= 200 else short[:197] + "..."
    return f"`{short.replace('`', chr(39)).replace('|', chr(92) + '|')}`"
