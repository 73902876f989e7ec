"""Pure torch: any device, any Ω, derivatives of any order by autograd. Right before fast."""
