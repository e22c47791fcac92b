"""What a checkpoint says about generating: generation_config.json, or older keys of config.json.

As in transformers, config.json is asked only where there is no generation_config.json.
``polyhead.generation`` interprets the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from polyhead.checkpoints.json_file import read_json
from polyhead.errors import CheckpointError, shortened
from polyhead.families.common.config_json import GENERATION_KEYS

FILE = "generation_config.json"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class GenerationConfig:
    """The values as the files have them.

    Attributes:
        values: Keys and values of generation_config.json.
        where: The file, for messages.
        prefix: Text in front of every source (``prefix`` of config.json).
        tasks: Names of tasks to such keys and a ``prefix`` (``task_specific_params``).
        start: ``decoder_start_token_id`` of config.json, which a generation_config.json may lack.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    where: str = FILE
    prefix: str = ""
    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    start: int | None = None

    @classmethod
    def from_directory(cls, directory: Path, config: Mapping[str, Any]) -> Self:
        """Reads the files that exist.

        Args:
            directory: With or without generation_config.json.
            config: the parsed config.json.

        Raises:
            CheckpointError: A file is corrupt, or a value of another kind.
        """
        path = directory / FILE
        where = directory / "config.json"
        if path.is_file():
            values, where = read_json(path), path
        else:
            wanted = GENERATION_KEYS.union(_TOKENS)
            values = {key: value for key, value in config.items() if key in wanted}
        prefix, tasks = config.get("prefix") or "", config.get("task_specific_params") or {}
        if not isinstance(prefix, str):
            raise CheckpointError(
                f"{directory}: config.json's prefix must be a text: got {shortened(prefix)}"
            )
        if not (isinstance(tasks, dict) and all(isinstance(each, dict) for each in tasks.values())):
            raise CheckpointError(
                f"{directory}: config.json's task_specific_params must be objects by name: got "
                f"{shortened(tasks)}"
            )
        start = config.get("decoder_start_token_id")
        return cls(values, str(where), prefix, tasks, start)

    def for_config_json(self) -> dict[str, Any]:
        """The keys that are written to config.json."""
        found: dict[str, Any] = {}
        if self.prefix:
            found["prefix"] = self.prefix
        if self.tasks:
            found["task_specific_params"] = {name: dict(each) for name, each in self.tasks.items()}
        if self.start is not None:
            found["decoder_start_token_id"] = self.start
        return found
