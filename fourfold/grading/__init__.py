"""Grade many untrusted kernels, on one machine or on many: see `fourfold.grading.driver.grade`."""
