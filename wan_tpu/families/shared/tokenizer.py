"""Tokenizers for small checkpoints: one like T5's, trained on real sentences, and one like Qwen's."""

from collections.abc import Sequence

import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers


def train_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Train a T5-like tokenizer (unigram, "▁" for spaces, "</s>" at the end) on the sentences below."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


def make_qwen_tokenizer(
    special: Sequence[str] = (), chat_template: str | None = None
) -> transformers.PreTrainedTokenizerBase:
    """Return a Qwen tokenizer of single bytes, without merges.

    Args:
        special: Special tokens in addition to those of a chat.
        chat_template: How a chat becomes text.
    """
    end_of_text, *chat = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = transformers.Qwen2Tokenizer(
        vocab={character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
        merges=[],
        additional_special_tokens=[*chat, *special],
        pad_token=end_of_text,
        eos_token=chat[-1],
        unk_token=end_of_text,
        padding_side="right",
    )
    tokenizer.chat_template = chat_template
    return tokenizer


_SENTENCES = """
A cat looks into the camera, its whiskers moving in a light breeze, soft afternoon light on its fur.
A dog runs along the beach while waves roll in and the sun goes down behind the hills.
Two people walk through a quiet street in the rain; lanterns are reflected on the wet stones.
The camera moves slowly forward over a green valley, clouds drift across the mountains.
A red ball rolls to the right over a green floor and bounces off a blue box.
Steam rises from a cup of coffee on a wooden table next to an open book.
A small boat crosses the lake at dawn, its wake spreading in long smooth lines.
Leaves fall from the trees in the park, children play and laugh in the distance.
Close-up of hands kneading dough, flour in the air, warm light from the window on the left.
A train passes over the bridge, the river below is fast and full after the storm.
Snow covers the roofs of the village; smoke comes out of the chimneys into a clear blue sky.
The astronaut turns round, the Earth is mirrored in the visor of the helmet.
A flower opens in time lapse, drops of water shine on its petals.
Static, overexposed, blurred details, worst quality, low quality, JPEG compression residue, ugly,
extra fingers, poorly drawn hands, deformed, disfigured, still picture, messy background, walking backwards.
High quality, detailed, cinematic, smooth motion, 4K, 24 frames per second, shallow depth of field.
""".strip().splitlines()
