"""Model families: what each does differently, their networks, and how checkpoints are read.

In reading order:

- `spec`: `BackboneSpec` and `PatternSpec` (what a family does differently), and the protocol `Backbone` of a network in
  its two kinds, `SplitBackbone` and `OpaqueBackbone`;
- `network`: what this package's own networks share;
- `rotary`: what networks with rotary positions share;
- `bert`, `llama`, `dit`: the networks;
- `bert_families`, `llama_families`, `dit_families`: the tables `BERT_FAMILIES` and so on (how families name tensors and
  fields), and how a network is built and filled by them;
- `transformers_adapter`: any other masked language model, run by transformers;
- `weights`: safetensors files;
- `peft_adapter`: LoRA adapters in PEFT's layout, merged as weights are read;
- `config`: where a model's folder is, and its config.json;
- `tokenizer`: its tokenizer and control tokens;
- `loader`: `load_model`, which puts all of it together;
- `gguf_llama`: from a GGUF file to a model folder, for training;
- `mini/`: the embedded model.
"""
