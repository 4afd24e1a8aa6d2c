"""One reader of TOML recipes: training recipes, problem pools and SFT mixes differ in their models only."""
