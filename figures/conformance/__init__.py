"""The same command lines under torchrun and under everstep run, and what differs."""
