"""The machine as everything above may use it: files that anybody may have made, memory that may not be there."""
