export function keepSamples() {}
