// Right calls of frame GDN's operators give the right numbers: one head, two frames, K = 2, V = 1, worked out by hand.
//
//	S: (1 -1) W0 + U0 = (-1 -1)     (-1 -1) W1 + U1 = (1 -2)     h = (1 1) W1 + U1 = (3 0)     M = W0 W1 = (2 1; 4 3)
//	z: uz0 = (1 0)     W1 (1 0) + uz1 = (0 2)     Mz = W1 W0 = (3 4; 1 2)
//	G1 = (1 0)     dW1 = (-1 -1)^T G1     G0 = G1 W1^T = (0 1)     dW0 = (1 -1)^T G0     dS0 = G0 W0^T = (2 4)
#include "check.h"

static tensor pool[64];
static int used;
static DLTensor *t(void *data, int rank, int64_t a, int64_t b, int64_t c, int64_t d, int64_t e) {
	tensor *x = view(&pool[used++], data, rank, a, b, c, d);
	x->shape[4] = e;
	return &x->t;
}

static float W[] = {1, 2, 3, 4, 0, 1, 1, 0}, U[] = {1, 1, 2, -1}, uz[] = {1, 0, 0, 1}, S0[] = {1, -1};

int main(void) {
	float S[4], z[4], ST[2], zT[2];
	gdn_frame_fwd_args f = {.size = sizeof f, .W = t(W, 4, 1, 2, 2, 2, 0), .U = t(U, 4, 1, 2, 1, 2, 0), .Wz = t(W, 4, 1, 2, 2, 2, 0), .uz = t(uz, 3, 1, 2, 2, 0, 0),
		.initial_state = t(S0, 3, 1, 1, 2, 0, 0), .S = t(S, 4, 1, 2, 1, 2, 0), .z = t(z, 3, 1, 2, 2, 0, 0), .final_state = t(ST, 3, 1, 1, 2, 0, 0),
		.final_z = t(zT, 2, 1, 2, 0, 0, 0)};
	CHECK(gdn_frame_fwd(&f) == GDN_OK);
	CHECK(same(S, (double[]){-1, -1, 1, -2}, 4) && same(z, (double[]){1, 0, 0, 2}, 4) && same(ST, (double[]){1, -2}, 2) && same(zT, (double[]){0, 2}, 2));
	f.padding = 1;
	CHECK(gdn_frame_fwd(&f) == GDN_OK && same(S, (double[]){-1, -1, -1, -1}, 4) && same(zT, (double[]){1, 0}, 2));
	f.padding = 0, f.exclusive = 1;
	CHECK(gdn_frame_fwd(&f) == GDN_OK && same(S, (double[]){1, -1, -1, -1}, 4) && same(ST, (double[]){1, -2}, 2));
	f.exclusive = 0, f.reverse = 1; // (1 -1) W1 + U1 = (1 0)     (1 0) W0 + U0 = (2 3)
	CHECK(gdn_frame_fwd(&f) == GDN_OK && same(S, (double[]){2, 3, 1, 0}, 4));
	f.reverse = 0;
	CHECK(gdn_frame_fwd(&f) == GDN_OK);
	f.padding = 3;
	CHECK(gdn_frame_fwd(&f) == GDN_INVALID_ARGUMENT && strcmp(gdn_last_error(), "gdn_frame_fwd: padding is 3, expected at most T=2") == 0);

	float dST[] = {1, 0}, dW[8], dU[4], dS0[2];
	gdn_frame_bwd_args b = {.size = sizeof b, .W = f.W, .S = f.S, .initial_state = f.initial_state, .dfinal_state = t(dST, 3, 1, 1, 2, 0, 0),
		.dW = t(dW, 4, 1, 2, 2, 2, 0), .dU = t(dU, 4, 1, 2, 1, 2, 0), .dinitial_state = t(dS0, 3, 1, 1, 2, 0, 0)};
	CHECK(gdn_frame_bwd(&b) == GDN_OK);
	CHECK(same(dW, (double[]){0, 1, 0, -1, -1, 0, -1, 0}, 8) && same(dU, (double[]){0, 1, 1, 0}, 4) && same(dS0, (double[]){2, 4}, 2));

	float dS[] = {0, 0, 1, 0};
	gdn_frame_pullback_args p = {.size = sizeof p, .W = f.W, .dS = t(dS, 4, 1, 2, 1, 2, 0), .dinitial_state = b.dinitial_state};
	dS0[0] = dS0[1] = 0;
	CHECK(gdn_frame_pullback(&p) == GDN_OK && same(dS0, (double[]){2, 4}, 2));

	float h[2], M[4], hz[2], Mz[4];
	gdn_frame_summary_fwd_args s = {.size = sizeof s, .W = f.W, .U = f.U, .Wz = f.Wz, .uz = f.uz, .h = t(h, 3, 1, 1, 2, 0, 0), .M = t(M, 3, 1, 2, 2, 0, 0),
		.hz = t(hz, 2, 1, 2, 0, 0, 0), .Mz = t(Mz, 3, 1, 2, 2, 0, 0)};
	CHECK(gdn_frame_summary_fwd(&s) == GDN_OK);
	CHECK(same(h, (double[]){3, 0}, 2) && same(M, (double[]){2, 1, 4, 3}, 4) && same(hz, (double[]){0, 2}, 2) && same(Mz, (double[]){3, 4, 1, 2}, 4));
	gdn_frame_summary_bwd_args sb = {.size = sizeof sb, .W = f.W, .U = f.U, .dh = b.dfinal_state, .dW = b.dW, .dU = b.dU};
	CHECK(gdn_frame_summary_bwd(&sb) == GDN_OK && same(dW, (double[]){0, 0, 0, 0, 1, 0, 1, 0}, 8) && same(dU, (double[]){0, 1, 1, 0}, 4));

	gdn_frame_merge_fwd_args m = {.size = sizeof m, .M = t(M, 4, 1, 1, 2, 2, 0), .h = t(h, 4, 1, 1, 1, 2, 0), .Mz = t(Mz, 4, 1, 1, 2, 2, 0),
		.hz = t(hz, 3, 1, 1, 2, 0, 0), .initial_state = f.initial_state, .S = t(ST, 4, 1, 1, 1, 2, 0), .z = t(zT, 3, 1, 1, 2, 0, 0)};
	CHECK(gdn_frame_merge_fwd(&m) == GDN_OK && same(ST, (double[]){1, -2}, 2) && same(zT, (double[]){0, 2}, 2));
	float dM[4], dh[2];
	gdn_frame_merge_bwd_args mb = {.size = sizeof mb, .M = m.M, .S = m.S, .initial_state = f.initial_state, .dS = t(dST, 4, 1, 1, 1, 2, 0),
		.dM = t(dM, 4, 1, 1, 2, 2, 0), .dh = t(dh, 4, 1, 1, 1, 2, 0), .dinitial_state = b.dinitial_state};
	CHECK(gdn_frame_merge_bwd(&mb) == GDN_OK);
	CHECK(same(dM, (double[]){1, 0, -1, 0}, 4) && same(dh, (double[]){1, 0}, 2) && same(dS0, (double[]){2, 4}, 2));

	// Two tokens in a frame: k = (1 0), (1 2)   v = 1, 3   beta = 1, 1/2   decay = 1/2
	float k[] = {1, 0, 1, 2}, v[] = {1, 3}, beta[] = {1, 0.5f}, decay[] = {0.5f}, oneW[4], oneU[2], oneUz[2];
	gdn_frame_build_fwd_args n = {.size = sizeof n, .k = t(k, 5, 1, 1, 2, 1, 2), .v = t(v, 5, 1, 1, 2, 1, 1), .beta = t(beta, 4, 1, 1, 2, 1, 0),
		.decay = t(decay, 3, 1, 1, 1, 0, 0), .kz = t(k, 5, 1, 1, 2, 1, 2), .W = t(oneW, 5, 1, 1, 1, 2, 2), .U = t(oneU, 5, 1, 1, 1, 1, 2), .uz = t(oneUz, 4, 1, 1, 1, 2, 0)};
	CHECK(gdn_frame_build_fwd(&n) == GDN_OK);
	CHECK(same(oneW, (double[]){-0.25, -0.5, -0.5, -0.5}, 4) && same(oneU, (double[]){2.5, 3}, 2) && same(oneUz, (double[]){1.5, 1}, 2));
	float gW[4] = {0}, gU[] = {1, 0}, dk[4], dv[2], dbeta[2], ddecay[1];
	gdn_frame_build_bwd_args nb = {.size = sizeof nb, .k = n.k, .v = n.v, .beta = n.beta, .decay = n.decay, .dW = t(gW, 5, 1, 1, 1, 2, 2), .dU = t(gU, 5, 1, 1, 1, 1, 2),
		.dk = t(dk, 5, 1, 1, 2, 1, 2), .dv = t(dv, 5, 1, 1, 2, 1, 1), .dbeta = t(dbeta, 4, 1, 1, 2, 1, 0), .ddecay = t(ddecay, 3, 1, 1, 1, 0, 0)};
	CHECK(gdn_frame_build_bwd(&nb) == GDN_OK);
	CHECK(same(dk, (double[]){1, 0, 1.5, 0}, 4) && same(dv, (double[]){1, 0.5}, 2) && same(dbeta, (double[]){1, 3}, 2) && same(ddecay, (double[]){0}, 1));

	float q[] = {1, 1, 2, 0}, num[2], den[2], last[] = {1, -2}, lastz[] = {0, 2};
	gdn_frame_project_fwd_args r = {.size = sizeof r, .q = t(q, 5, 1, 1, 2, 1, 2), .S = t(last, 5, 1, 1, 1, 1, 2), .qz = t(q, 5, 1, 1, 2, 1, 2),
		.z = t(lastz, 4, 1, 1, 1, 2, 0), .num = t(num, 5, 1, 1, 2, 1, 1), .den = t(den, 4, 1, 1, 2, 1, 0)};
	CHECK(gdn_frame_project_fwd(&r) == GDN_OK && same(num, (double[]){-1, 2}, 2) && same(den, (double[]){2, 0}, 2));
	float dnum[] = {1, 0}, dq[4], dlast[2];
	gdn_frame_project_bwd_args rb = {.size = sizeof rb, .q = r.q, .S = r.S, .dnum = t(dnum, 5, 1, 1, 2, 1, 1), .dq = t(dq, 5, 1, 1, 2, 1, 2), .dS = t(dlast, 5, 1, 1, 1, 1, 2)};
	CHECK(gdn_frame_project_bwd(&rb) == GDN_OK && same(dq, (double[]){1, -2, 0, 0}, 4) && same(dlast, (double[]){1, 1}, 2));
	return 0;
}
