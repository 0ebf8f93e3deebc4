"""What models call: differentiable operators, and linears with their GEMMs in the formats of a precision policy."""
