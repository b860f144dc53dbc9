"""Makes the tokenizers of this folder, and the keys that llama.cpp's own package writes for them.

    pip install gguf==0.19.0 tokenizers==0.23.3 transformers==5.23.0 sentencepiece==0.2.3
    python tests/core/gguf/make_tokenizers.py

Tokens and their types are taken from transformers as convert_hf_to_gguf.py of llama.cpp takes them, and everything
else is read and written by gguf. That script tells by a hash of real tokenizers how to split text, so the name is given
here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

HERE = Path(__file__).parent / "tokenizers"
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
SPLIT += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXT = ["The quick brown fox, 1234 foxes and the others; it's the fox's den.", "Žluťoučký kůň and 狐狸 \U0001f98a"] * 3
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build(name: str) -> None:
    llama = name == "llama3"
    tokenizer = Tokenizer(models.BPE(ignore_merges=llama))
    pattern = SPLIT % ("{1,3}" if llama else "")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if not llama:
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    first, last = ("<|begin_of_text|>", "<|end_of_text|>") if llama else ("<|endoftext|>", "<|im_end|>")
    tokenizer.add_special_tokens([first, last])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("<|fim|>", special=False)])
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": last}
    if llama:
        template = processors.TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 300)])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
        settings |= {"bos_token": first, "chat_template": CHAT}
    else:
        settings |= {"bos_token": None, "pad_token": {"content": first, "__type": "AddedToken"}, "add_bos_token": False}
        settings |= {"chat_template": [{"name": "tools", "template": "x"}, {"name": "default", "template": CHAT}]}
    (folder := HERE / name).mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"bos_token_id": 300, "eos_token_id": [301], "vocab_size": 310}))
    write(folder, "llama-bpe" if llama else "qwen2", 310)


def build_pieces() -> None:
    (folder := HERE / "llama2").mkdir(parents=True, exist_ok=True)
    given = {"model_type": "bpe", "vocab_size": 330, "byte_fallback": True, "user_defined_symbols": ["<own>"]}
    given["normalization_rule_name"] = "identity"
    with (folder / "tokenizer.model").open("wb") as file:
        SentencePieceTrainer.train(sentence_iterator=iter(TEXT), model_writer=file, minloglevel=2, **given)
    decoder = {
        "0": {"content": "<unk>", "special": True},
        "1": {"content": "<s>", "special": True},
        "2": {"content": "</s>", "special": True},
        "331": {"content": "<|fim|>", "special": False},
        "332": {"content": "▁call", "special": False},
    }
    settings = {"add_bos_token": True, "add_eos_token": False, "bos_token": "<s>", "eos_token": "</s>"}
    settings |= {"add_prefix_space": True, "chat_template": CHAT, "added_tokens_decoder": decoder}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "added_tokens.json").write_text(json.dumps({"<extra>": 330}))
    (folder / "config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 340}))
    model = SentencePieceProcessor()
    model.LoadFromFile(str(folder / "tokenizer.model"))
    kinds = gguf.TokenType
    tokens = {place: (f"[PAD{place}]", -10000.0, kinds.UNUSED) for place in range(340)}
    for place in range(model.vocab_size()):
        tests = {kinds.UNKNOWN: model.IsUnknown, kinds.CONTROL: model.IsControl, kinds.BYTE: model.IsByte}
        kind = next((kind for kind, test in tests.items() if test(place)), kinds.NORMAL)
        tokens[place] = model.IdToPiece(place), model.GetScore(place), kind
    tokens[330] = "<extra>", -1000.0, kinds.USER_DEFINED
    for place in range(3):
        tokens[place] = decoder[str(place)]["content"], -1000.0, kinds.CONTROL
    tokens[331], tokens[332] = ("<|fim|>", -1000.0, kinds.CONTROL), (" call", -1000.0, kinds.USER_DEFINED)
    writer = gguf.GGUFWriter(folder / "vocab.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token for token, _, _ in tokens.values()])
    writer.add_token_scores([score for _, score, _ in tokens.values()])
    writer.add_token_types([kind for _, _, kind in tokens.values()])
    writer.add_add_space_prefix(True)
    gguf.SpecialVocab(folder, n_vocab=340).add_to_gguf(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def write(folder: Path, pre: str, rows: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = {number: token for token, number in tokenizer.get_vocab().items()}
    added, kinds = tokenizer.added_tokens_decoder, gguf.TokenType
    tokens, types = [], []
    for place in range(rows):
        token = names.get(place, f"[PAD{place}]")
        looks = token.startswith("<|") and token.endswith("|>")
        own = kinds.CONTROL if place in added and (added[place].special or looks) else kinds.USER_DEFINED
        tokens.append(token)
        types.append(own if place in added else kinds.NORMAL if place in names else kinds.UNUSED)
    writer = gguf.GGUFWriter(folder / "vocab.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special = gguf.SpecialVocab(folder, load_merges=True)
    if isinstance(special.chat_template, list):
        special.chat_template = next(one["template"] for one in special.chat_template if one["name"] == "default")
    special.add_to_gguf(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


if __name__ == "__main__":
    build("llama3")
    build("qwen2")
    build_pieces()
