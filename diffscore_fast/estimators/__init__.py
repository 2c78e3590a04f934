"""Plans in front of the model and reductions behind it. Estimators know no model and no tokenizer."""
