# Builds libint8.so and libbase_fp8.so (today's fp8 kernels) for sm_90a.
set -e
cd "$(dirname "$0")"; O=/tmp/int8_obj; mkdir -p $O
flags="-std=c++17 -O3 -lineinfo -Xcompiler -fPIC,-fvisibility=hidden -gencode=arch=compute_90a,code=sm_90a -Xptxas -v"
for n in int8 quantise_rows table_few table_many stamps; do
  { [ $O/$n.o -nt csrc/$n.cu ] && [ $O/$n.o -nt csrc/int8_product.cuh ] && [ $O/$n.o -nt csrc/hopper.cuh ]; } || nvcc $flags -c csrc/$n.cu -o $O/$n.o > $O/$n.log 2>&1 &
done
wait
grep -hE "error|C7[0-9]+|warning" $O/*.log || true
nvcc -shared -cudart static $O/int8.o $O/quantise_rows.o $O/table_few.o $O/table_many.o -o libint8.so
nvcc -shared -cudart static $O/stamps.o -o libstamps.so
python3 - <<'P'
import re
for name in ("table_few", "table_many", "quantise_rows"):
    t = open(f"/tmp/int8_obj/{name}.log").read()
    for m in re.finditer(r"Compiling entry function '(\S+)'.*?\n.*?\n\s*(.*?spill loads)\n.*?Used (\d+) reg", t):
        if not m[2].startswith("0 bytes stack"): print(name, re.findall(r"L[ib](\d+)E", m[1]), m[2], m[3])
P
ls -la libint8.so
