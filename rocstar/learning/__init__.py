"""From groups to new weights: quality, resampling, advantages, loss, packing, learner, SFT."""
