"""A submission to AlgoPerf, which imports it as a package."""
