"""The same command lines under torchrun and under everstep run, and how the results differ."""
