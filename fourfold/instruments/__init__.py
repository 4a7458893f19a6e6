"""What observes a call: redzones, sparse memory, concurrent calls, line coverage, operators."""
