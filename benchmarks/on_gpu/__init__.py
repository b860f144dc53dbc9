"""Steps that were measured on a GPU, beside their forecasts: real models, one GPU, alone or as one rank of many."""
