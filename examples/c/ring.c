// A sequence spread over MPI ranks: forward and backward, compared with what one rank computes alone.
//
// Each rank sums up what its tokens do to the state, sends the state that leaves them to the next rank as soon as the one that enters has
// come, and only then computes its outputs. The gradient goes the other way. Whatever the length, one state of K x V a head crosses an edge.
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include "gdn.h"

enum { T = 1000, H = 2, HV = 4, K = 64, V = 48, STATE = HV * K * V };

static float q[T][H][K], k[T][H][K], v[T][HV][V], g[T][HV], beta[T][HV], dout[T][HV][V]; // the whole sequence, on every rank

typedef struct {
	float o[T][HV][V], dq[T][H][K], dk[T][H][K], dv[T][HV][V], dg[T][HV], dbeta[T][HV];
} results;

static DLTensor view(void *data, int rank, int64_t *shape) {
	return (DLTensor){.data = data, .device = {kDLCPU, 0}, .ndim = rank, .dtype = {kDLFloat, 32, 1}, .shape = shape};
}

static void must(int status) {
	if (status == GDN_OK)
		return;
	fprintf(stderr, "%s\n", gdn_last_error());
	MPI_Abort(MPI_COMM_WORLD, 1);
}

// The tokens from `from` to `from + n`, the state x before them, the gradient dx of the state behind them (NULL: 0), and what the backward
// needs from the forward.
typedef struct {
	int64_t n, qs[4], vs[4], gs[3], xs[4], tapes[1];
	DLTensor q, k, v, g, beta, dout, x, dx, tape;
} window;

static void open_window(window *w, int from, int n, float *x, float *dx) {
	*w = (window){.n = n, .qs = {1, n, H, K}, .vs = {1, n, HV, V}, .gs = {1, n, HV}, .xs = {1, HV, K, V}};
	w->q = view(q[from], 4, w->qs), w->k = view(k[from], 4, w->qs), w->v = view(v[from], 4, w->vs);
	w->g = view(g[from], 3, w->gs), w->beta = view(beta[from], 3, w->gs), w->dout = view(dout[from], 4, w->vs);
	w->x = view(x, 4, w->xs), w->dx = view(dx, 4, w->xs);
	w->tapes[0] = gdn_fwd_TAPE(1, n, H, HV, K, V, 1);
	w->tape = view(calloc(w->tapes[0] + 1, sizeof(float)), 1, w->tapes);
}

static void forward(window *w, results *r) {
	DLTensor o = view(r->o, 4, w->vs);
	must(gdn_fwd(&(gdn_fwd_args){.size = sizeof(gdn_fwd_args), .q = &w->q, .k = &w->k, .v = &w->v, .g = &w->g, .beta = &w->beta,
		.initial_state = &w->x, .o = &o, .tape = &w->tape}));
}

static void backward(window *w, results *r) {
	static float first[STATE]; // gradient of the state before them, which the summary has sent already
	DLTensor dq = view(r->dq, 4, w->qs), dk = view(r->dk, 4, w->qs), dv = view(r->dv, 4, w->vs);
	DLTensor dg = view(r->dg, 3, w->gs), dbeta = view(r->dbeta, 3, w->gs), dh0 = view(first, 4, w->xs);
	must(gdn_bwd(&(gdn_bwd_args){.size = sizeof(gdn_bwd_args), .q = &w->q, .k = &w->k, .v = &w->v, .g = &w->g, .beta = &w->beta,
		.initial_state = &w->x, .tape = &w->tape, .dout = &w->dout, .dht = w->dx.data ? &w->dx : NULL,
		.dq = &dq, .dk = &dk, .dv = &dv, .dg = &dg, .dbeta = &dbeta, .dh0 = &dh0}));
}

// out = M x + S: sends a state, or a gradient of one, through the map of a window.
static void apply(float *map, DLTensor *x, float *out) {
	int64_t ss[] = {1, 1, HV, K, V}, ms[] = {1, 1, HV, K, K}, strides[] = {STATE, STATE, K * (V + K), V + K, 1}, xs[] = {1, HV, K, V};
	DLTensor s = view(map, 5, ss), m = view(map + V, 5, ms), result = view(out, 4, xs);
	s.strides = m.strides = strides;
	must(gdn_summary_merge(&(gdn_summary_merge_args){.size = sizeof(gdn_summary_merge_args), .s = &s, .m = &m, .state = x, .out = &result}));
}

static double draw(void) { return rand() / (RAND_MAX + 1.0) - 0.5; }

// The largest difference between the ranks' rows, put together, and those of one rank, relative to the largest value.
static double compare(const char *name, const void *mine, const float *whole, int row, const int *borders, int rank, int ranks) {
	int counts[ranks], at[ranks];
	for (int r = 0; r < ranks; r++)
		counts[r] = (borders[r + 1] - borders[r]) * row, at[r] = borders[r] * row;
	float *all = malloc(sizeof(float) * T * row);
	MPI_Gatherv(mine, counts[rank], MPI_FLOAT, all, counts, at, MPI_FLOAT, 0, MPI_COMM_WORLD);
	double worst = 0, largest = 0;
	for (int i = 0; rank == 0 && i < T * row; i++)
		worst = fmax(worst, isfinite(all[i]) ? fabs(all[i] - whole[i]) : INFINITY), largest = fmax(largest, fabs(whole[i]));
	free(all);
	if (rank > 0)
		return 0;
	printf("%-6s differs by %.1e of its largest value\n", name, worst / largest);
	return worst / largest;
}

int main(int argc, char **argv) {
	int rank, ranks;
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);

	srand(1);
	for (int t = 0; t < T; t++) {
		for (int h = 0; h < H; h++) {
			double norm = 0;
			for (int i = 0; i < K; i++)
				q[t][h][i] = draw(), k[t][h][i] = draw(), norm += k[t][h][i] * k[t][h][i];
			for (int i = 0; i < K; i++)
				k[t][h][i] /= sqrt(norm);
		}
		for (int h = 0; h < HV; h++) {
			for (int i = 0; i < V; i++)
				v[t][h][i] = draw(), dout[t][h][i] = draw();
			g[t][h] = 0.02 * (draw() - 0.5), beta[t][h] = draw() + 0.5;
		}
	}

	// Shards of growing length: nothing asks for equal ones.
	int borders[ranks + 1];
	for (int r = 0; r <= ranks; r++)
		borders[r] = (int64_t)T * r * (r + 1) / (ranks * (ranks + 1));

	static results part, whole;
	static float x[STATE], dx[STATE], out[STATE], map[HV * K * (V + K)];
	int64_t maps[] = {1, HV, K, V + K};
	DLTensor packed = view(map, 4, maps);
	window mine;
	open_window(&mine, borders[rank], borders[rank + 1] - borders[rank], x, dx);
	MPI_Request receive = MPI_REQUEST_NULL, send = MPI_REQUEST_NULL;

	// Forward. The receive is posted before the work, the send goes out before the outputs are computed.
	if (rank > 0)
		MPI_Irecv(x, STATE, MPI_FLOAT, rank - 1, 0, MPI_COMM_WORLD, &receive);
	if (rank < ranks - 1)
		must(gdn_summary_fwd(&(gdn_summary_fwd_args){.size = sizeof(gdn_summary_fwd_args), .k = &mine.k, .v = &mine.v, .g = &mine.g,
			.beta = &mine.beta, .map = &packed}));
	MPI_Wait(&receive, MPI_STATUS_IGNORE);
	if (rank < ranks - 1) {
		apply(map, &mine.x, out);
		MPI_Isend(out, STATE, MPI_FLOAT, rank + 1, 0, MPI_COMM_WORLD, &send);
	}
	forward(&mine, &part);
	MPI_Wait(&send, MPI_STATUS_IGNORE);

	// Backward: the same with the gradient of the state, from the last rank to the first.
	if (rank < ranks - 1)
		MPI_Irecv(dx, STATE, MPI_FLOAT, rank + 1, 1, MPI_COMM_WORLD, &receive);
	if (rank > 0)
		must(gdn_summary_bwd(&(gdn_summary_bwd_args){.size = sizeof(gdn_summary_bwd_args), .q = &mine.q, .k = &mine.k, .g = &mine.g,
			.beta = &mine.beta, .dout = &mine.dout, .map = &packed}));
	MPI_Wait(&receive, MPI_STATUS_IGNORE);
	if (rank > 0) {
		apply(map, &mine.dx, out);
		MPI_Isend(out, STATE, MPI_FLOAT, rank - 1, 1, MPI_COMM_WORLD, &send);
	}
	backward(&mine, &part);
	MPI_Wait(&send, MPI_STATUS_IGNORE);

	// The same on one rank.
	if (rank == 0) {
		static float zero[STATE];
		window all;
		open_window(&all, 0, T, zero, NULL);
		forward(&all, &whole);
		backward(&all, &whole);
		printf("%d tokens on %d ranks, %d to %d each; %d KB a direction and edge\n", T, ranks, borders[1], T - borders[ranks - 1],
			(int)(sizeof x / 1024));
	}
	double worst = 0;
#define COMPARE(name) worst = fmax(worst, compare(#name, part.name, (float *)whole.name, \
	sizeof part.name / sizeof(float) / T, borders, rank, ranks))
	COMPARE(o), COMPARE(dq), COMPARE(dk), COMPARE(dv), COMPARE(dg), COMPARE(dbeta);
	MPI_Bcast(&worst, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
	MPI_Finalize();
	return worst > 1e-5;
}
