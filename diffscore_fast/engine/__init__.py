"""The engine: windows over shared prefixes, composed, deduplicated, packed and evaluated.

In reading order:

- `plan`: what an estimator asks (`Sequences`, `MaskPlan`, `Estimator`);
- `windows`: from plans to windows and the prefixes they share; `ragged`: the index arithmetic of flat arrays;
- `packing`: equal windows once, then waves and packs; `packs`: the arrays of one pack;
- `cache`: keys and values of prefixes;
- `forward`: the forward pass of a pack, for either kind of backbone;
- `results`: values collected while the next pack is computed;
- `runner`: `Runner`, which leads a plan through all of these;
- `check`: a loaded model checks that packing changes no score;
- `memory`: a memory budget, divided among cache, packs and plans;
- `streams`: rows in chunks; `session`: `ScoringModel`, the base of `DiffScorer` and `LikelihoodBounds`;
- `random`: counter-based random numbers; `profile`: where a run's time goes.
"""
