"""A recipe made into a run: vocabulary, rows, model, and at the end a directory that loads.

The output folder holds the model (``config.json``, ``model.safetensors``, the tokenizer), the
run's state, the weights of the least validation loss, the history and its curves.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from polyhead.checkpoints import Checkpoint, Tokenizer, save_checkpoint
from polyhead.checkpoints.generation_config import GenerationConfig
from polyhead.errors import CheckpointError, ContextLengthError, InputError
from polyhead.families import read_config
from polyhead.generation import LanguageModel, TextToText
from polyhead.generation.decoding.options import GenerationOptions
from polyhead.models import Transformer
from polyhead.training.batches import Batches, PackedDocuments, PaddedPairs, Row, pack
from polyhead.training.copying import begin_with_copying
from polyhead.training.corpora import CORPORA, Corpus, Pair
from polyhead.training.history import History
from polyhead.training.recipe import Recipe, differences
from polyhead.training.run import Run
from polyhead.training.state import read_facts
from polyhead.training.texts import documents_of, pairs_of_files, pairs_of_table
from polyhead.training.vocabulary import make_tokenizer

_LONGEST = 1.5
"""In tests an output has at most this many times its source's tokens, and 20 more."""


class Job:
    """What a recipe asks for.

    Args:
        out: Output folder, made when something is saved.
        resume: Continue from the state in the folder.

    Attributes:
        model: The ``TextToText`` or ``LanguageModel`` that is trained.
        run: The training loop; iterate over it, or over ``steps``.

    Raises:
        InputError: Texts that cannot be used.
        ConfigError: A model that cannot be.
        CheckpointError: To resume, a state of another recipe; or without, a state that would be
            overwritten.
    """

    def __init__(self, recipe: Recipe, out: str | Path, *, resume: bool = False) -> None:
        self.recipe, self.out = recipe, Path(out)
        self._check_folder(resume=resume)
        self.corpus: Corpus | None = None
        texts: Sequence[str] = ()
        if recipe.data.text:
            texts = documents_of((recipe.folder / path for path in recipe.data.text),
                                 recipe.data.documents)  # type: ignore[arg-type]  # fmt: skip
        else:
            self.corpus = _corpus(recipe)
            texts = [text for pair in self.corpus.training for text in (pair.source, pair.target)]
        self.tokenizer = self._tokenizer(texts, resume=resume)
        torch.manual_seed(recipe.schedule.seed)
        transformer = self._transformer()
        rows, held, collate = self._rows(transformer, texts)
        budget, seed = recipe.data.batch_tokens, recipe.schedule.seed
        self.batches = Batches(rows, collate, budget, seed)
        self.model = self._wrapped(transformer)
        self.run = Run(
            self.model,
            self.batches,
            recipe.schedule,
            validation=Batches(held, collate, budget).epoch(),
            folder=self.out,
            about={"recipe": recipe.to_dict()},
        )
        if resume:
            self.run.resume()
        self.history = History(self.out / "history.jsonl", self.run.steps)

    def steps(self) -> Any:
        """The run's steps, each written to the history."""
        for step in self.run:
            if self.run.is_main:
                self.history.add(step, self.run.seconds)
            yield step

    def finish(self) -> None:
        """Takes the best weights and saves the model, where ``polyhead.load`` finds it.

        Raises:
            CheckpointError: It cannot be written.
        """
        self.run.use_best()
        if not self.run.is_main:
            return
        transformer = self.model.transformer
        said: dict[str, Any] = {}
        start = None
        if isinstance(self.model, TextToText):
            start = self.model.options.decoder_start_token_id
            said = {"decoder_start_token_id": start}
        save_checkpoint(
            Checkpoint(
                transformer.config,
                transformer,
                self.tokenizer,
                self.recipe.name,
                family=str(self.recipe.model["model_type"]),
                generation=GenerationConfig(said, start=start),
            ),
            self.out,
        )
        self.history.draw(self.out / "curves.svg", self.recipe.name)

    def translated(self, sources: Sequence[str]) -> list[str]:
        """The model's greedy output for each source."""
        assert isinstance(self.model, TextToText)
        training = self.model.training
        self.model.eval()
        try:
            longest = max(len(self.tokenizer.encode(source)) for source in sources)
            found = self.model.generate(
                list(sources), max_new_tokens=int(_LONGEST * longest) + 20, batch_size=64
            )
        finally:
            self.model.train(training)
        return [each.text for each in found]

    def sample(self, text: str) -> str:
        """The model's output for a text: its translation or continuation."""
        if isinstance(self.model, TextToText):
            return self.translated([text])[0]
        training = self.model.training
        self.model.eval()
        try:
            return text + "".join(
                self.model.stream(text, max_new_tokens=60, temperature=0.8, seed=0)
            )
        finally:
            self.model.train(training)

    def _check_folder(self, *, resume: bool) -> None:
        state = self.out / "state.safetensors"
        if resume:
            before = read_facts(state)["about"].get("recipe", {})
            found = differences(self.recipe.to_dict(), before)
            if found:
                raise CheckpointError(
                    f"{state} is a state of another recipe: {'; '.join(found[:3])}"
                )
        elif state.exists():
            raise CheckpointError(
                f"{self.out} holds the state of a run: give --resume to go on with it, or another "
                "folder"
            )

    def _tokenizer(self, texts: Sequence[str], *, resume: bool) -> Tokenizer:
        folder = self.out / "vocabulary"
        if resume:
            return Tokenizer.from_directory(folder)
        asked = self.recipe.vocabulary
        made = make_tokenizer(texts, asked.kind, asked.size)  # type: ignore[arg-type]
        folder.mkdir(parents=True, exist_ok=True)
        made.save(folder)
        return made

    def _transformer(self) -> Transformer:
        recipe, tokenizer = self.recipe, self.tokenizer
        pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
        values = {
            "vocab_size": tokenizer.vocab_size,
            "pad_token_id": pad,
            "eos_token_id": end,
            **({"decoder_start_token_id": pad} if self.corpus is not None else {}),
            **{key: value for key, value in recipe.model.items() if key != "begin"},
        }
        config = read_config(values, f"{recipe.name}, [model]")
        wanted = "encoder-decoder" if self.corpus is not None else "decoder"
        if config.kind != wanted:
            raise InputError(
                f"{recipe.name}: these data need an {wanted}: model_type "
                f"{recipe.model['model_type']!r} is kind {config.kind!r}"
            )
        made = Transformer(config)
        if recipe.model.get("begin") == "copying":
            begin_with_copying(made)
        return made

    def _wrapped(self, transformer: Transformer) -> TextToText | LanguageModel:
        if self.corpus is None:
            return LanguageModel(transformer, self.tokenizer, self.recipe.name)
        start = transformer.config.pad_token_id
        options = GenerationOptions(max_new_tokens=512, decoder_start_token_id=start)
        return TextToText(transformer, self.tokenizer, self.recipe.name, options)

    def _rows(self, model: Transformer, texts: Sequence[str]) -> tuple[Any, Any, Any]:
        """Rows to learn from, rows to test on, and what makes a batch of them."""
        data, encode = self.recipe.data, self.tokenizer.encode
        pad = self.tokenizer.pad_token_id or 0
        if self.corpus is None:
            most = min(data.length, model.config.max_positions)
            packed = pack([encode(text) for text in texts], most)
            held = min(data.held_out, len(packed) // 10)
            if not held:
                raise InputError(
                    f"{len(packed)} rows of {most} tokens are too few: 10 are needed, so that one "
                    "can be held out"
                )
            absolute = model.config.embedding.positions is not None
            return packed[held:], packed[:held], PackedDocuments(pad, positions=absolute)
        most = model.config.encoder.max_positions or model.config.max_positions

        def row(pair: Pair) -> Row:
            made = Row(encode(pair.source), encode(pair.target))
            for name, ids in (("source", made.read), ("target", made.written)):
                if len(ids) > most:
                    raise ContextLengthError(
                        f"{pair.where}: the {name} has {len(ids):,} tokens, the model has "
                        f"positions for {most:,}"
                    )
            return made

        training = [row(pair) for pair in self.corpus.training]
        return training, [row(pair) for pair in self.corpus.held_out], PaddedPairs(pad)


def _corpus(recipe: Recipe) -> Corpus:
    data = recipe.data
    if data.corpus:
        return CORPORA[data.corpus]()
    if data.pairs:
        pairs = pairs_of_table(recipe.folder / data.pairs)
    else:
        pairs = pairs_of_files(recipe.folder / data.source, recipe.folder / data.target)
    held = min(data.held_out, len(pairs) // 10)
    if not held:
        raise InputError(f"{len(pairs)} pairs are too few: 10 are needed, so one can be held out")
    generator = torch.Generator().manual_seed(recipe.schedule.seed)
    order = torch.randperm(len(pairs), generator=generator, device="cpu").tolist()
    return Corpus([pairs[i] for i in order[held:]], [pairs[i] for i in order[:held]])


def scored(metric: str, written: Sequence[str], wanted: Sequence[str]) -> float:
    """``"exact"``: the fraction of texts that are right; ``"bleu"``: sacrebleu's, of 100.

    Raises:
        InputError: sacrebleu is not installed.
    """
    if metric == "exact":
        pairs = list(zip(written, wanted, strict=True))
        return sum(a == b for a, b in pairs) / max(len(pairs), 1)
    from polyhead._utils.checks import needed

    sacrebleu = needed("sacrebleu", "polyhead[train]")
    found: float = sacrebleu.corpus_bleu(list(written), [list(wanted)]).score
    return found
