"""Reading and writing files of rows: JSON Lines, CSV, TSV and Parquet."""
