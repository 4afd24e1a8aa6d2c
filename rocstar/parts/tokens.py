"""Tokens added to a model, so that a base model can be talked to under our templates."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import AddedToken

from rocstar.dialogue.codec import Codec
from rocstar.dialogue.tokenizer_files import read_model_files, read_tokenizer
from rocstar.errors import ConfigError
from rocstar.parts.modelfolder import TOKENIZER, find_model


def add_tokens(name: str, folder: Path, tokens: Sequence[str]) -> Path:
    """Write the model of that name into `folder`, which must not exist, with these tokens as special ones. Each gets
    the next id, and the mean of the known tokens' rows in the embedding and in the output head, which grow where they
    have no row for it: it is as probable as an average token until it is learned. Raises ConfigError."""
    from rocstar.learning.models import load_model

    if folder.exists():
        raise ConfigError(f"{folder} is there already; remove it or give another folder")
    source = find_model(name)
    tokenizer = read_tokenizer(source, read_model_files(source).tokenizer)
    if there := [token for token in tokens if tokenizer.token_to_id(token) is not None]:
        raise ConfigError(f"the tokenizer in {source} has {', '.join(there)} already; leave out what it has")
    known = sorted(set(tokenizer.get_vocab(with_added_tokens=True).values()))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in tokens])
    model = load_model(source)
    rows = model.get_input_embeddings().weight.shape[0]
    model.resize_token_embeddings(max(rows, Codec(tokenizer).vocab_size), mean_resizing=False)
    new, known = [tokenizer.token_to_id(token) for token in tokens], [number for number in known if number < rows]
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    for weight in {id(table.weight): table.weight.detach() for table in tables if table is not None}.values():
        weight[new] = weight[known].mean(0)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        made = Path(scratch) / "model"
        model.to(model.config.dtype).save_pretrained(made)
        for file in (file for pattern in TOKENIZER for file in source.glob(pattern)):
            shutil.copyfile(file, made / file.name)
        tokenizer.save(str(made / "tokenizer.json"))
        os.replace(made, folder)
    return folder
