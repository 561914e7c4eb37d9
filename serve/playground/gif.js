// A GIF of frames, each { width, height, data } of RGBA bytes, all of one size; it repeats.

const MOST_COLOURS = 256;
const CODES = 4096; // of LZW, at most

export function encodeGif(frames, milliseconds) {
  const { width, height } = frames[0];
  const { colours, index } = paletteOf(frames);
  const bits = Math.max(2, Math.ceil(Math.log2(colours.length)));
  const bytes = [..."GIF89a"].map((letter) => letter.charCodeAt(0));
  const word = (number) => bytes.push(number & 255, number >> 8);
  word(width);
  word(height);
  bytes.push(0xf0 | (bits - 1), 0, 0);
  for (let i = 0; i < 2 ** bits; i += 1) bytes.push(...(colours[i] ?? [0, 0, 0]));
  bytes.push(0x21, 0xff, 11, ...[..."NETSCAPE2.0"].map((letter) => letter.charCodeAt(0)), 3, 1, 0, 0, 0);
  for (const frame of frames) {
    bytes.push(0x21, 0xf9, 4, 0);
    word(Math.round(milliseconds / 10));
    bytes.push(0, 0, 0x2c, 0, 0, 0, 0);
    word(width);
    word(height);
    bytes.push(0, bits);
    const data = compressed(pixelsOf(frame, index), bits);
    for (let i = 0; i < data.length; i += 255) {
      const block = data.slice(i, i + 255);
      bytes.push(block.length, ...block);
    }
    bytes.push(0);
  }
  bytes.push(0x3b);
  return new Uint8Array(bytes);
}

const exact = (data, i) => (data[i] << 16) | (data[i + 1] << 8) | data[i + 2];
// The nearest of 6 x 7 x 6 colours, which is what fits where there are too many.
const coarse = (data, i) => (Math.round(data[i] / 51) * 51 << 16) | (Math.round(data[i + 1] / 42.5) * 42.5 << 8)
  | Math.round(data[i + 2] / 51) * 51;

// The colours of all frames, and the function that gives a pixel's number among them.
function paletteOf(frames) {
  for (const key of [exact, coarse]) {
    const numbers = new Map();
    for (const { data } of frames) {
      for (let i = 0; i < data.length; i += 4) if (!numbers.has(key(data, i))) numbers.set(key(data, i), numbers.size);
    }
    if (numbers.size <= MOST_COLOURS) {
      const colours = [...numbers.keys()].map((colour) => [colour >> 16, (colour >> 8) & 255, colour & 255]);
      return { colours, index: (data, i) => numbers.get(key(data, i)) };
    }
  }
  throw new Error("coarse colours are at most 252");
}

function pixelsOf({ data }, index) {
  return Uint8Array.from({ length: data.length / 4 }, (_, i) => index(data, 4 * i));
}

// LZW as GIF has it: codes grow from bits + 1 to 12 bits, and begin anew when they are used up.
function compressed(pixels, bits) {
  const clear = 2 ** bits;
  const bytes = [];
  let table;
  let size;
  let held = 0;
  let count = 0;
  const write = (code) => {
    held |= code << count;
    for (count += size; count >= 8; count -= 8, held >>>= 8) bytes.push(held & 255);
  };
  const begin = () => {
    table = new Map();
    size = bits + 1;
  };
  begin();
  write(clear);
  let prefix = pixels[0];
  for (const pixel of pixels.subarray(1)) {
    const known = table.get(prefix * MOST_COLOURS + pixel);
    if (known !== undefined) {
      prefix = known;
      continue;
    }
    write(prefix);
    const next = clear + 2 + table.size;
    if (next === CODES) {
      write(clear);
      begin();
    } else {
      table.set(prefix * MOST_COLOURS + pixel, next);
      if (next === 2 ** size) size += 1;
    }
    prefix = pixel;
  }
  write(prefix);
  write(clear + 1);
  if (count) bytes.push(held & 255);
  return bytes;
}
