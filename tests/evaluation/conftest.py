"""A plain model folder of random weights that eval and chat can open, made once."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    from rocstar.config.sections import ModelSection
    from rocstar.dialogue.bpe import train_bpe
    from rocstar.dialogue.segments import text_of
    from rocstar.dialogue.templates import template_named
    from rocstar.learning.models import random_model
    from rocstar.learning.policy import Policy

    template = template_named("compact")
    text = text_of(template.opening("1+1?", ()))
    codec = train_bpe([text], vocab_size=300, markers=template.markers, word_merges=False)
    size = {"hidden_size": 32, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "intermediate_size": 32}
    shape = ModelSection(vocab_size=codec.vocab_size, rope_theta=1000.0, max_positions=256, **size)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    Policy(random_model(shape, 0), codec, template).save(folder)
    return folder
