"""Grading of many kernels that nobody trusts, on one machine or on many: see `fourfold.grading.driver.grade`."""
