"""From rows of texts to rows of tokens: which rows can be scored, in which template, with which eligible tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from diffscore_fast.arguments import checked_column
from diffscore_fast.backbones.spec import PatternSpec
from diffscore_fast.errors import InputError
from diffscore_fast.status import (
    EMPTY_CANDIDATE,
    EMPTY_SOURCE,
    NO_ELIGIBLE_TOKENS,
    OK,
    SCORED,
    TOO_LONG,
    TRUNCATED_SOURCE,
    InvalidRecord,
)
from diffscore_fast.text.checks import check_text
from diffscore_fast.text.spans import tokens_within
from diffscore_fast.text.tagger import Tagger
from diffscore_fast.text.tokenizer import NO_SPANS, Encoded, TextTokenizer, count_of

if TYPE_CHECKING:
    from diffscore_fast.scoring.config import ScoreConfig

_NOTHING = Encoded(np.zeros(0, np.int32), NO_SPANS)
_CLASS_NAMES = {"content": "content words", "function": "function words", "entities": "entities"}


@dataclass(frozen=True)
class TokenRows:
    """n rows as tokens.

    Parameters
    ----------
    sources, candidates : list of Encoded
        Empty in rows that cannot be scored; a source as it was cut, empty if the direction reads none.
    status, messages : list of str
    truncated : int64 [n]
        Number of source tokens that were cut.
    frames : dict of str to pair of int32 arrays
        The template's tokens before and after the context, for each simple direction.
    """

    sources: list[Encoded]
    candidates: list[Encoded]
    status: list[str]
    messages: list[str]
    truncated: np.ndarray
    frames: dict[str, tuple[np.ndarray, np.ndarray]]

    def sides(self, direction: str, rows: list[int]) -> tuple[list[np.ndarray], list[Encoded]]:
        """Contexts (with the template) and targets of these rows, for a simple direction."""
        before, after = self.frames[direction]
        if direction == "marginal":
            return [np.concatenate([before, after])] * len(rows), [self.candidates[row] for row in rows]
        contexts, targets = self.sources, self.candidates
        if direction == "reverse":
            contexts, targets = targets, contexts
        ids = [contexts[row].ids for row in rows]
        if len(before) or len(after):
            ids = [np.concatenate([before, own, after]) for own in ids]
        return ids, [targets[row] for row in rows]


class RowTokenizer:
    """Tokenises rows for one model.

    Parameters
    ----------
    tokenizer : TextTokenizer
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._taggers: dict[str, Tagger] = {}
        self._known_frames: dict[tuple[str, ...], tuple[np.ndarray, np.ndarray]] = {}  # by the template's words

    def tokenise(
        self, rows: Sequence[tuple[Any, Any]], config: ScoreConfig, patterns: Sequence[tuple[PatternSpec, int]]
    ) -> TokenRows:
        """Tokens and status of (source, candidate) rows of any values. Equal texts are tokenised once.

        Parameters
        ----------
        rows : sequence of pairs
        config : ScoreConfig
        patterns : sequence of (PatternSpec, int)
            The patterns that will be read, and the number of tokens that each has positions for.

        Raises
        ------
        InputError
            If the template alone has too many tokens for the model.
        """
        checked = [_text_status(config, *row) for row in rows]
        status, messages = [state for state, _ in checked], [message for _, message in checked]
        usable = [row for row, state in zip(rows, status, strict=True) if state == OK]
        texts = list(dict.fromkeys(text for row in usable for text in (row if config.needs_source else row[1:])))
        room = _Room(config, self._frames(config), patterns)
        # A source that is cut is read to its end, to count its tokens; any other text only until it is too long.
        cuts = config.overlength == "truncate-source"
        spans = config.token_scores or config.mask_words != "all"
        if cuts:
            found = self._tokenizer.encode(texts, spans=spans)
        else:
            found = self._tokenizer.encode_up_to(texts, room.max_tokens, spans=spans)
        encoded = dict(zip(texts, found, strict=True))
        if config.mask_words != "all":
            targets = dict.fromkeys(text for row in usable for text in scored_texts(config, *row))
            encoded.update(self._tagged({text: encoded[text] for text in targets}, config, room.max_tokens))
        sources, candidates = [_NOTHING] * len(rows), [_NOTHING] * len(rows)
        truncated = np.zeros(len(rows), dtype=np.int64)
        needs_source, by_class = config.needs_source, config.mask_words != "all"
        for row, (source_text, candidate_text) in enumerate(rows):
            if status[row] != OK:
                continue
            candidate = encoded[candidate_text]
            source = encoded[source_text] if needs_source else _NOTHING
            status[row], messages[row], cut = room.status(source, candidate)
            if cut:
                truncated[row], source = cut, source.head(len(source.ids) - cut)
            scored = scored_texts(config, source, candidate) if by_class and status[row] in SCORED else ()
            if not all(item.num_eligible for item in scored):
                status[row] = NO_ELIGIBLE_TOKENS
                messages[row] = f"no {_CLASS_NAMES[config.mask_words]} in the scored text"
            sources[row], candidates[row] = source, candidate
        return TokenRows(sources, candidates, status, messages, truncated, room.frames)

    def tagger(self, model: str) -> Tagger:
        """The tagger of this name; loaded once, at its first use."""
        if model not in self._taggers:
            self._taggers[model] = Tagger(model)
        return self._taggers[model]

    def _frames(self, config: ScoreConfig) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Tokens of the template before and after the context, for each simple direction."""
        frames = {}
        for direction, _ in config.passes:
            words = tuple(config.template.frame(direction))
            if words not in self._known_frames:
                before, after = self._tokenizer.encode(words, keep_blank=True, spans=False)
                self._known_frames[words] = before.ids, after.ids
            frames[direction] = self._known_frames[words]
        return frames

    def _tagged(self, targets: dict[str, Encoded], config: ScoreConfig, max_tokens: int) -> dict[str, Encoded]:
        """The texts with their eligible tokens marked; only the first `max_tokens` are tagged."""
        texts = [
            text[: item.spans[max_tokens - 1, 1]] if len(item.ids) > max_tokens else text
            for text, item in targets.items()
        ]
        ranges = self.tagger(config.tagger).ranges(texts, config.mask_words)
        return {
            text: replace(item, eligible=tokens_within(item.spans, found))
            for (text, item), found in zip(targets.items(), ranges, strict=True)
        }


def split_items(rows: Sequence[tuple[Any, ...]]) -> tuple[list[tuple[Any, Any]], list[str]]:
    """(source, candidate, item) rows as (source, candidate) rows and the items' names.

    A whole number is a name, too. A row whose item is neither cannot be scored: its texts become an `InvalidRecord`.
    """
    pairs: list[tuple[Any, Any]] = []
    items: list[str] = []
    for source, candidate, item in rows:
        name = str(item) if isinstance(item, int | np.integer) and not isinstance(item, bool) else item
        status, message = check_text("item", name)
        if status == OK:
            pairs.append((source, candidate))
            items.append(name)
        else:
            wrong = InvalidRecord(message)
            pairs.append((wrong, wrong))
            items.append("")
    return pairs, items


def checked_columns(config: ScoreConfig, sources: Any, references: Any, candidates: Any) -> Sequence[Any]:
    """The sources or references, checked; one None per candidate if the direction reads none."""
    candidates = checked_column("candidates", candidates)
    if references is not None:
        if sources is not None:
            raise InputError("references take the place of sources; give only one of the two, and None for sources")
        references = checked_column("references", references)
        if len(references) != len(candidates):
            raise InputError(f"{len(references)} lists of references but {len(candidates)} candidates")
        return references
    if sources is not None:
        sources = checked_column("sources", sources)
    if sources is None:
        if config.needs_source:
            raise InputError(f"direction {config.direction!r} reads sources; give one per candidate")
        return [None] * len(candidates)
    if len(sources) != len(candidates):
        raise InputError(f"{len(sources)} sources but {len(candidates)} candidates; give one source per candidate")
    return sources


def scored_texts(config: ScoreConfig, source: Any, candidate: Any) -> tuple[Any, ...]:
    """Those of the two texts of a row that are targets."""
    if config.direction == "reverse":
        return (source,)
    return (source, candidate) if config.direction == "bidirectional" else (candidate,)


def _text_status(config: ScoreConfig, source: Any, candidate: Any) -> tuple[str, str]:
    """Status and message of a row, from its values alone."""
    status, message = check_text("candidate", candidate)
    return check_text(config.context_name, source) if status == OK and config.needs_source else (status, message)


@dataclass(frozen=True)
class _Room:
    """How many tokens a model has positions for under a configuration, and so which rows fit."""

    config: ScoreConfig
    frames: dict[str, tuple[np.ndarray, np.ndarray]]
    patterns: Sequence[tuple[PatternSpec, int]]
    _left: dict[int, tuple[int, int]] = field(default_factory=dict)  # by the candidate's number of tokens

    def __post_init__(self) -> None:
        size = max(len(before) + len(after) for before, after in self.frames.values())
        if size >= self.max_tokens:
            name = self.config.template.name
            raise InputError(
                f"template {name!r} has {size} tokens, the model takes {self.max_tokens}; use a shorter one"
            )

    @property
    def max_tokens(self) -> int:
        """Number of tokens that every pattern has positions for."""
        return min(max_tokens for _, max_tokens in self.patterns)

    def status(self, source_tokens: Encoded, candidate_tokens: Encoded) -> tuple[str, str, int]:
        """Status and message of a row with these tokens, and how many source tokens are cut."""
        config, name = self.config, self.config.context_name
        source, candidate = len(source_tokens.ids), len(candidate_tokens.ids)
        if candidate == 0:
            return EMPTY_CANDIDATE, "the candidate has no tokens", 0
        if config.needs_source and source == 0:
            return EMPTY_SOURCE, f"the {name} has no tokens", 0
        room_candidate, room_source = self._left_for_texts(candidate)
        if candidate > room_candidate:
            return TOO_LONG, f"the candidate has {count_of(candidate_tokens)}, the model takes {room_candidate}", 0
        if not config.needs_source or source <= room_source:
            return OK, "", 0
        if config.overlength == "truncate-source" and room_source >= 1:
            cut = source - room_source
            return TRUNCATED_SOURCE, f"the last {cut} of the {name}'s {source} tokens were cut", cut
        return TOO_LONG, f"the {name} has {count_of(source_tokens)}, there is room for {max(room_source, 0)}", 0

    def _left_for_texts(self, candidate: int) -> tuple[int, int]:
        """How many tokens the candidate and the source may have under all patterns."""
        if candidate not in self._left:
            rooms = [self._left_under(pattern, max_tokens, candidate) for pattern, max_tokens in self.patterns]
            self._left[candidate] = tuple(min(sizes) for sizes in zip(*rooms, strict=True))  # type: ignore[assignment]
        return self._left[candidate]

    def _left_under(self, pattern: PatternSpec, max_tokens: int, candidate: int) -> tuple[int, int]:
        """How many tokens the candidate and the source may have under a pattern.

        If window positions restart, the target may use all positions, and so may the context with its template. If not,
        they share the positions.
        """
        template = {direction: len(before) + len(after) for direction, (before, after) in self.frames.items()}
        if pattern.restart_positions:
            taken_from_candidate = template.get("reverse", 0)
            taken_from_source = max((size for name, size in template.items() if name != "reverse"), default=0)
        else:
            taken_from_candidate = max(template.values())
            taken_from_source = taken_from_candidate + candidate
        separators = len(pattern.separator_ids)
        if taken_from_candidate and not pattern.restart_positions:  # the template alone is a context, and is separated
            taken_from_candidate += separators
        return max_tokens - taken_from_candidate, max_tokens - taken_from_source - separators
