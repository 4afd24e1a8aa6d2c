"""The typed keys of a pool recipe: inputs, rules, output. `config/layers.py` reads them."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from rocstar.config.values import Section


class InputSection(Section):
    name: str
    """How rows of this file are named in every output."""
    path: str
    """JSONL, CSV or parquet, plain or gzip, below `data`; a folder of `save_to_disk`; or hf:NAME[:CONFIG]@SPLIT."""
    question: list[str] = []
    """Columns of the question, joined by a space; a dot steps into a nested one. Empty: found by the layout."""
    answer: str | None = None
    """Column of the reference answer. None: found by the layout; only the questions of a benchmark are read."""
    license: str = "not stated"
    """Terms under which its publisher gives it away, for the datasheet."""
    cut: list[str] = []
    """Texts taken out of each question, such as instructions that a prompt begins or ends with."""


class LimitsSection(Section):
    max_answer_digits: int = Field(default=15, ge=1)
    """Digits; a longer integer is dropped as huge."""
    max_question_chars: int = Field(default=4000, ge=1)
    max_bad_rows: int = Field(default=0, ge=0)
    """Rows that cannot be read and are dropped before the build stops."""


class RulesSection(Section):
    skip: list[str] = []
    """Names of rules that are not applied."""


class RewriteSection(Section):
    fractions_and_roots: bool = False
    """Ask for p + q of an answer p/q, and p + q + r of p sqrt(r)/q, so that these too have an integer answer."""


class DuplicatesSection(Section):
    near: float = Field(default=0.7, ge=0.5)
    """Share of three-token shingles in common from which on a text with the same answer is a repeat; above 1: off."""


class AgreementSection(Section):
    answers: list[str] = []
    """Files that hold what somebody answered to each problem: JSONL of {"id" or "question", "answers": [text, ...]}, or
    the samples.parquet of evaluations. Empty: no check."""
    sources: list[str] = []
    """Sources whose labels are checked (OpenMathReasoning alone in the paper, §4.2); empty: all."""
    least: int = Field(default=2, ge=1)
    """k: a problem with fewer answers equal to its label is dropped (the paper's 2 of 16)."""

    def covers(self, source: str) -> bool:
        """Whether its labels are checked."""
        return bool(self.answers) and source in (self.sources or [source])


class PoolConfig(Section):
    data: str = "../shared/data"
    """Folder that the paths of sources and benchmarks are relative to."""
    out: str = "pools/pool"
    """Folder that is written."""
    keep: list[str] = []
    """Further columns of the sources that go into the pool."""
    limits: LimitsSection = LimitsSection()
    rules: RulesSection = RulesSection()
    rewrite: RewriteSection = RewriteSection()
    duplicates: DuplicatesSection = DuplicatesSection()
    agreement: AgreementSection = AgreementSection()
    source: list[InputSection] = Field(min_length=1)
    """In order: of two equal questions the first is kept."""
    benchmark: list[InputSection] = []
    """Questions that no kept problem may overlap with."""
    known_benchmarks: bool = True
    """Compare also with every benchmark that comes with rocstar and whose rows are below `data`."""

    def complaints(self) -> Iterator[str]:
        names = [source.name for source in self.source]
        for name in self.agreement.sources:
            if name not in names:
                yield f"agreement.sources names {name!r}, which is no source; there are {', '.join(names)}"
