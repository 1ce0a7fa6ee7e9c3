"""Traces: what the engine saw and did, layer by layer and block by block, as Parquet files (docs/traces.md).

A folder holds ``layers/*.parquet``, ``blocks/*.parquet`` and ``manifest.json``. A shard counts only once the manifest
names it, and the manifest is replaced in one step, after both of its files; so a killed run leaves at most files that
nobody reads, and the next run neither loses nor doubles a prompt. Reading streams, and checks each shard on the way.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from .errors import ConfigError, FormatError
from .safe_files import inside
from .trace_schema import BLOCK_SCHEMA, LAYER_SCHEMA, MANIFEST, BlockRow, LayerRow, Manifest, Shard, read_manifest
from .trace_tables import prompt_tables

Folder = str | os.PathLike[str]


class TraceWriter:
    """Writes a trace folder, prompt by prompt; opening a folder again continues it.

    Use it as a context manager: leaving it without an error commits what is left.

    Args:
        folder: made where it does not exist.
        run: name of the run.
        config: settings of the run, JSON values only.
        prompts_per_shard: prompts that are committed together; a killed run loses at most these.

    Raises:
        ConfigError: the folder holds traces of another run or other settings, or another process is writing there.
        FormatError: the folder's manifest is damaged or foreign.
    """

    def __init__(self, folder: Folder, run: str, config: Mapping[str, Any], prompts_per_shard: int = 8) -> None:
        if prompts_per_shard < 1:
            raise ConfigError(f"prompts_per_shard is {prompts_per_shard}: at least one prompt goes into a shard")
        self.folder = Path(folder)
        self.prompts_per_shard = prompts_per_shard
        for name in ("layers", "blocks"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self._lock = self._take_lock()
        try:
            self.manifest = self._open_manifest(Manifest(run, json.loads(json.dumps(config))))
        except BaseException:
            self.close()
            raise
        self._done = {prompt for shard in self.manifest.shards for prompt in shard.prompts}
        self._pending: list[tuple[str, pa.Table, pa.Table]] = []

    def done_prompts(self) -> frozenset[str]:
        """Prompts that are committed; a resumed run skips them."""
        return frozenset(self._done)

    @property
    def rows(self) -> int:
        """Layer rows committed so far."""
        return sum(shard.layer_rows for shard in self.manifest.shards)

    def add_prompt(self, prompt: str, layer_rows: Iterable[LayerRow], block_rows: Iterable[BlockRow]) -> None:
        """Add all rows of one prompt; commits when enough prompts have gathered.

        Args:
            prompt: its id, unique in the folder.
            layer_rows: its drafted layers.
            block_rows: its blocks.

        Raises:
            ConfigError: the prompt was added before, or a row contradicts itself.
        """
        self.add_tables(prompt, *prompt_tables(self.manifest.run, prompt, list(layer_rows), list(block_rows)))

    def add_tables(self, prompt: str, layers: pa.Table, blocks: pa.Table) -> None:
        """The same with the tables of `trace_tables.prompt_tables`, which may come from another process.

        Raises:
            ConfigError: the prompt was added before.
        """
        if prompt in self._done or any(prompt == other for other, _, _ in self._pending):
            raise ConfigError(f"Prompt '{prompt}' is in '{self.folder}' already: skip `done_prompts`, use unique ids")
        self._pending.append((prompt, layers, blocks))
        if len(self._pending) >= self.prompts_per_shard:
            self.commit()

    def commit(self) -> None:
        """Write the prompts gathered so far as one shard, and then the manifest that names it."""
        if not self._pending:
            return
        name = f"{len(self.manifest.shards):06d}.parquet"
        layers = pa.concat_tables(table for _, table, _ in self._pending)
        blocks = pa.concat_tables(table for _, _, table in self._pending)
        layer_path, block_path = self.folder / "layers" / name, self.folder / "blocks" / name
        _write_table(layer_path, layers)
        _write_table(block_path, blocks)
        prompts = [prompt for prompt, _, _ in self._pending]
        hashes = _sha256(layer_path), _sha256(block_path)
        self.manifest.shards.append(Shard(name, layers.num_rows, blocks.num_rows, hashes[0], hashes[1], prompts))
        scratch = self.folder / f".{MANIFEST}.writing"
        scratch.write_text(json.dumps(asdict(self.manifest), indent=1) + "\n")
        scratch.replace(self.folder / MANIFEST)
        self._done.update(prompts)
        self._pending = []

    def close(self) -> None:
        """Let go of the folder; prompts that were not committed are dropped."""
        os.close(self._lock)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        self.close()

    def _open_manifest(self, wanted: Manifest) -> Manifest:
        if not (self.folder / MANIFEST).exists():
            return wanted
        found = read_manifest(self.folder)
        if (found.run, found.config) != (wanted.run, wanted.config):
            raise ConfigError(
                f"'{self.folder}' holds traces of run '{found.run}' with other settings: give those settings to "
                "continue it, or another folder"
            )
        return found

    def _take_lock(self) -> int:
        handle = os.open(self.folder / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise ConfigError(f"Another process is writing to '{self.folder}': wait, or give another folder") from error
        return handle


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_table(path: Path, table: pa.Table) -> None:
    scratch = path.with_name(f".{path.name}.writing")
    try:
        pq.write_table(table, scratch, compression="zstd")
        scratch.replace(path)
    except OSError:  # a full disk: give back what was taken
        scratch.unlink(missing_ok=True)
        raise


def read_layers(
    folder: Folder,
    columns: Sequence[str] | None = None,
    batch_size: int = 65536,
    shards: Sequence[Shard] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Stream the layer rows of a trace folder.

    Args:
        folder: the trace folder.
        columns: names of the columns wanted; None takes all (``trace.LAYER_SCHEMA``).
        batch_size: most rows in one batch.
        shards: those to read, in this order; None takes all that are committed.

    Yields:
        Record batches.

    Raises:
        ConfigError: a column that does not exist.
        FormatError: the folder is foreign or of another version or feature schema; a shard is missing, damaged or half
            written.
    """
    yield from _read(folder, "layers", columns, batch_size, shards)


def read_blocks(
    folder: Folder,
    columns: Sequence[str] | None = None,
    batch_size: int = 65536,
    shards: Sequence[Shard] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Stream the block rows of a trace folder (``trace.BLOCK_SCHEMA``); see `read_layers`."""
    yield from _read(folder, "blocks", columns, batch_size, shards)


def check_traces(folder: Folder) -> Manifest:
    """Read every byte of a trace folder once.

    Returns:
        Its manifest.

    Raises:
        FormatError: see `read_layers`.
    """
    manifest = read_manifest(folder)
    for read in (read_layers, read_blocks):
        for _ in read(folder, shards=manifest.shards):
            pass
    return manifest


def _read(
    folder: Folder,
    table: Literal["layers", "blocks"],
    columns: Sequence[str] | None,
    batch_size: int,
    shards: Sequence[Shard] | None,
) -> Iterator[pa.RecordBatch]:
    schema = LAYER_SCHEMA if table == "layers" else BLOCK_SCHEMA
    for name in columns or ():
        if name not in schema.names:
            raise ConfigError(f"The {table} table has no column '{name}': choose from {', '.join(schema.names)}")
    for shard in read_manifest(folder).shards if shards is None else shards:
        yield from _read_shard(Path(folder), f"{table}/{shard.name}", shard, schema, columns, batch_size)


def _read_shard(
    folder: Path, name: str, shard: Shard, schema: pa.Schema, columns: Sequence[str] | None, batch_size: int
) -> Iterator[pa.RecordBatch]:
    wanted = shard.layer_sha256 if schema is LAYER_SCHEMA else shard.block_sha256
    rows = shard.layer_rows if schema is LAYER_SCHEMA else shard.block_rows
    mend = "collect these traces again, or remove the shard's entry from the manifest to do without its prompts"
    path = folder / name
    try:
        regular = inside(folder, name)
        if _sha256(regular) != wanted:
            raise FormatError(f"'{path}' is not what its manifest says (damaged or half written): {mend}")
        with pq.ParquetFile(regular) as file:
            if not file.schema_arrow.equals(schema):
                raise FormatError(f"'{path}' has other columns than this Beamwise writes: {mend}")
            if file.metadata.num_rows != rows:
                raise FormatError(f"'{path}' has {file.metadata.num_rows} rows, its manifest says {rows}: {mend}")
            for batch in file.iter_batches(batch_size, columns=None if columns is None else list(columns)):
                _check_batch(batch, f"'{path}'", mend)
                yield batch
    except (OSError, pa.ArrowException) as error:
        raise FormatError(f"'{path}' cannot be read ({error}): {mend}") from error


def _check_batch(batch: pa.RecordBatch, where: str, mend: str) -> None:
    """Refuse what the writer never writes, even where the hash is right."""
    batch.validate(full=True)  # offsets within their buffers, texts in UTF-8
    for column, field in zip(batch.columns, batch.schema, strict=True):
        if column.null_count and field.name != "accept_prob":
            raise FormatError(f"{where} has empty cells in the column '{field.name}': {mend}")
